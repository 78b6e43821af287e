"""Names of files in a user's folder that are also modules of Python or of a library."""

SHADOWS = (
    *("types", "random", "json", "queue", "token", "secrets", "statistics", "signal", "tempfile"),
    *("inspect", "copy", "uuid", "sqlite3", "calendar", "code", "test", "profile", "select"),
    *("tokenizers", "yaml", "torch", "numpy", "ray", "datasets", "pydantic", "transformers"),
    *("vllm", "deepspeed", "pyarrow", "psutil", "rich", "pandas", "filelock", "tqdm", "grpc"),
    *("asyncrl", "safetensors", "huggingface_hub", "accelerate", "ninja", "tensorboard"),
)
