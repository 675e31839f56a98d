"""Names of models that are no download: paths, and names that mean nothing."""

from pathlib import Path

import pytest

from edge_transformer import hub
from edge_transformer.errors import ModelNotFoundError
from edge_transformer.hub.huggingface import HubName, parse_hub_name


def test_what_exists_as_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"  # looks like a hub id, but is here
    folder.mkdir(parents=True)
    file = folder / "model.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve("org/name") == Path("org/name")
    assert hub.resolve(str(file)) == hub.resolve(file) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org/name/model.gguf") == file
    (tmp_path / "demo").mkdir()
    assert hub.resolve("./demo") == Path("demo")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "no-such-model",
        "org/file.gguf",
        "/no/such/folder",
        "a/b/c",
        "org/name:",
        "x\0y",
        "x" * 5000,
        "org/na me",
        "é/è",
        "~no-such-user/model",
    ],
)
def test_a_name_that_means_nothing_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(name)
    assert len(str(caught.value)) < 500
    with pytest.raises(ModelNotFoundError):
        hub.pull(name)


def test_what_is_here_is_not_pulled(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf is here already.* nothing to download"):
        hub.pull(str(file))


def test_removing_a_path_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="left alone"):
        hub.remove(str(file))
    assert file.exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", None)),
        ("org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("org/name:sub/file-Q8_0.gguf", HubName("org/name", "sub/file-Q8_0.gguf")),
        ("org/name.gguf", None),
        ("org", None),
        ("./org/name", None),
        ("../name", None),
        ("org/.hidden", None),
        ("org/name:a:b", None),
    ],
)
def test_hub_names(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name
    if name is not None:
        assert str(name) == text


def test_without_a_home_folder_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ETE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(ModelNotFoundError, match="ETE_CACHE"):
        hub.resolve("demo", offline=True)
