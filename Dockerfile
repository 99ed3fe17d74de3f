# The package on vLLM's own image of the supported release, for a machine with an NVIDIA GPU and its container toolkit:
#   docker build -t tlt-lightning .
#   docker run --rm --gpus all --ipc=host -v tlt-outputs:/home/tlt/outputs tlt-lightning \
#     fit -c recipes/quickstart.yaml -c recipes/speculation.yaml --trainer.accelerator gpu
# A folder made by `init`, run as yourself, with a cache that keeps models of the hub:
#   docker run --rm --gpus all --ipc=host --user $(id -u):$(id -g) -e HOME=/tmp -v $PWD:/run -w /run \
#     -v ~/.cache/huggingface:/hub -e HF_HOME=/hub tlt-lightning fit -c recipes/... -c mine.yaml
FROM vllm/vllm-openai:v0.32.0

WORKDIR /build
COPY pyproject.toml README.md LICENSE source/
COPY recipes source/recipes
COPY callbacks source/callbacks
COPY tlt_lightning source/tlt_lightning
# vLLM is in the image, and so is the one torch it works with: the build fails rather than replaces it.
RUN uv pip freeze --system | grep '^torch==' > torch.txt \
    && uv pip install --system --no-cache --constraint torch.txt "./source[eagle3]" \
    && rm -r source torch.txt

RUN useradd --create-home tlt && install --directory --owner=tlt /home/tlt/outputs
USER tlt
WORKDIR /home/tlt
COPY --chown=tlt recipes recipes
COPY --chown=tlt callbacks callbacks
ENTRYPOINT ["python3", "-m", "tlt_lightning"]
CMD ["--help"]
