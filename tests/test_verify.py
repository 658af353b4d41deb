"""``llmtool verify``: the same in any layout; other where a layout was read wrongly."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from llmtool import cli
from llmtool.convert import convert_checkpoint, open_checkpoint
from llmtool.errors import Contradiction
from llmtool.evaluate import verify_checkpoints
from tests.tiny_tasks import write_tokenizer


@pytest.fixture
def source(oracle: Path) -> Path:
    return oracle / "hf_llama_gqa"


@pytest.mark.parametrize("to", ["meta", "pax:repeat,rope=half", "te", "native"])
def test_every_layout_computes_the_same(to: str, source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", to=to)
    found = verify_checkpoints(source, tmp_path / "out")
    assert found.equal
    assert found.positions >= 200
    ours, theirs = found.comparisons
    assert (ours.max_abs_diff, ours.kl, ours.top1_agreement) == (0, 0, 1)
    assert (theirs.a, theirs.b) == ("A by transformers", "A")
    assert 0 < theirs.max_abs_diff < 1e-5


def test_the_other_rope_order_is_found(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_checkpoint(source, tmp_path / "pax", to="pax")
    convert_checkpoint(tmp_path / "pax", tmp_path / "scrambled", to="hf", from_="pax:rope=half")
    assert cli.main(["verify", str(tmp_path / "pax"), str(tmp_path / "scrambled"), "-q", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert found["comparisons"][0]["max_abs_diff"] > 1
    assert found["comparisons"][0]["top1_agreement"] < 0.9
    assert found["comparisons"][1]["max_abs_diff"] < 1e-4  # transformers runs the scrambled weights as we do


def test_a_fact_of_the_arithmetic_is_found(source: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(source, wrong)
    facts = json.loads((wrong / "config.json").read_text())
    facts["rope_parameters"]["rope_theta"] = 20000.0
    (wrong / "config.json").chmod(0o644)
    (wrong / "config.json").write_text(json.dumps(facts))
    assert not verify_checkpoints(source, wrong).equal


def test_facts_that_one_side_lacks_come_from_the_other(source: Path, tmp_path: Path) -> None:
    for bare in ("pax:format=bare", "te:format=bare"):
        target = tmp_path / bare[:2]
        convert_checkpoint(source, target, to=bare)
        layout = bare if bare.startswith("pax") else f"{bare},gate=act_first"
        assert verify_checkpoints(source, target, layout_b=layout).equal
        assert verify_checkpoints(target, source, layout_a=layout).equal


def test_text_is_run_where_there_is_a_tokenizer(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", to="native")
    plain = verify_checkpoints(source, tmp_path / "out")
    write_tokenizer(tmp_path / "out")
    with_text = verify_checkpoints(source, tmp_path / "out")
    assert with_text.positions == 2 * plain.positions
    assert plain.notes == ["no tokenizer: random ids alone"]
    assert not with_text.notes


def test_a_short_table_of_positions_is_filled_with_more_rows(oracle: Path, tmp_path: Path) -> None:
    with open_checkpoint(oracle / "pax_gpt") as checkpoint:
        config = dataclasses.replace(checkpoint.known_config(), norm_eps=1e-5)
    convert_checkpoint(oracle / "pax_gpt", tmp_path / "te", to="te", model_config=config)
    found = verify_checkpoints(oracle / "pax_gpt", tmp_path / "te", model_config=config)
    assert found.equal
    assert found.positions >= 200


def test_other_sizes_are_an_error(oracle: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Contradiction, match="n_kv_heads"):
        verify_checkpoints(source, oracle / "hf_llama_mha_tied")
    assert cli.main(["verify", str(source), str(oracle / "hf_llama_mha_tied"), "-q"]) == 2
    assert cli.main(["verify", str(source), str(source / "nothing"), "-q"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_not_a_number_is_a_difference(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(source, broken, copy_function=shutil.copyfile)
    (file,) = [path for path in broken.glob("*.safetensors") if "model.norm.weight" in load_file(path)]
    weights = load_file(file)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    save_file(weights, file, metadata={"format": "pt"})
    assert cli.main(["verify", str(source), str(broken), "-q", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["max_abs_diff"] is None


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_convert_verifies_what_it_wrote(dtype: str | None, source: Path, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    cast = ["--dtype", dtype] if dtype else []
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "pax", "--verify", "-q", "--json", *cast]
    assert cli.main(arguments) == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert verified["equal"]
    assert verified["comparisons"][0]["max_abs_diff"] == 0


def test_convert_asks_for_missing_facts_before_it_begins(oracle: Path, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(oracle / "pax_llama_gqa"), str(tmp_path / "out"), "--to", "te", "--verify"]) == 2
    assert "norm_eps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
