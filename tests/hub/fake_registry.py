"""A package registry in a folder: wheels made by the tests, and an environment in which pip sees nothing else."""

import hashlib
import zipfile
from pathlib import Path

from edge_transformer.hub.demo import WheelModel

NAME = "ete-test-model"
MEMBER = "ete_test_model/tiny.Q4_1.gguf"


def make_wheel(folder: Path, contents: bytes, member: str = MEMBER) -> WheelModel:
    """Write a wheel that needs a package nobody has, and describe the model in it."""
    wheel = folder / "ete_test_model-1.0-py3-none-any.whl"
    information = "ete_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\nRequires-Dist: ete-no-such-package\n",
        )
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(member, contents)
        archive.writestr(f"{information}/RECORD", "")
    return WheelModel(
        requirement=f"{NAME}==1.0",
        member=MEMBER,
        nbytes=len(contents),
        sha256=hashlib.sha256(contents).hexdigest(),
        wheel_nbytes=wheel.stat().st_size,
    )


def only_registry(folder: Path) -> dict[str, str]:
    """Settings with which pip finds packages in `folder` alone and asks no network."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}
