"""What every test may use. Set before anything imports jax or transformers: no accelerator, no network."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # meshes
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

settings.register_profile("shared machines", deadline=None)  # time is no property of the code on a busy machine
settings.load_profile("shared machines")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def oracle() -> Path:
    """Small checkpoints that foreign code wrote; ``tests/fixtures/oracle/README.md`` tells how each was made."""
    return ROOT / "tests" / "fixtures" / "oracle"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real configs, data and golden numbers, beside the repository or at ``$LLMTOOL_SHARED``; skips without them."""
    folder = Path(os.environ.get("LLMTOOL_SHARED") or ROOT.parent / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no reference material at {folder}; set LLMTOOL_SHARED")
    return folder


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes do not name a test: archives hold the time of day, and each xdist worker would collect other names."""
    return argname if isinstance(val, bytes) else None
