# llmtool with CUDA. NOT BUILT HERE: this file was written on a machine without Docker and without a GPU, and nobody has
# run it yet. It says what the image needs; if a line is wrong, please say so.
#
#   docker build -t llmtool .
#   docker run --gpus all --ipc=host -v /data:/data llmtool pretrain --config synthetic-gpt-126m --benchmark --mesh data=8
#
# JAX brings CUDA, cuDNN and NCCL as wheels; of the host it needs the driver alone (580 or newer for CUDA 13). EXTRA:
# cuda12 for older drivers (525 on); te adds Transformer Engine, which is compiled and needs nvidia/cuda:…-devel as base.
FROM python:3.12-slim-bookworm

ARG EXTRA=cuda13
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/llmtool
COPY pyproject.toml README.md LICENSE ./
COPY llmtool ./llmtool
COPY convert ./convert
COPY evaluate ./evaluate
COPY train ./train
RUN pip install --no-cache-dir ".[${EXTRA}]"

# Memory is taken as it is needed up to this share; NCCL keeps the rest.
ENV XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
WORKDIR /work
ENTRYPOINT ["llmtool"]
