"""Hub repositories, against a small hub on this machine, with the real huggingface_hub."""

import json
import random
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from edge_transformer import hub
from edge_transformer.errors import CapacityError, FormatError, ModelNotFoundError, StorageError, UnsupportedModelError
from edge_transformer.hub.huggingface import HubName, cached_model
from hub.fake_hub import FakeHub, serving

BIG = random.Random(3).randbytes(3_000_001)
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
SHARDED = {
    "README.md": b"hello",
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model-00001-of-00002.safetensors": BIG,
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "pytorch_model.bin": b"pickled",
    "original/params.json": b"{}",
}
GGUFS = {"m-Q8_0.gguf": BIG, "m-Q4_K_M.gguf": b"four", "README.md": b"hello"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving() as running:
        use(running.url, tmp_path / "hf", monkeypatch)
        monkeypatch.setenv("ETE_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield running


def use(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "hf_test")


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_safetensors_model_is_loaded_with_all_that_belongs_to_it_and_nothing_else(server: FakeHub) -> None:
    server.repositories["org/name"] = SHARDED
    reports: list[tuple[str, int, int]] = []
    folder = hub.resolve("org/name", progress=lambda *report: reports.append(report))
    assert names_in(folder) == sorted(set(SHARDED) - {"README.md", "pytorch_model.bin", "original/params.json"})
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == BIG
    assert server.tokens == {"hf_test"}
    total = len(BIG) + len(b"second")
    assert reports[-1] == ("downloading model-00002-of-00002.safetensors", total, total)
    assert all(0 <= done <= total for _, done, total in reports)


def test_a_complete_model_is_used_without_a_request_and_pull_looks_for_a_newer_one(server: FakeHub) -> None:
    server.repositories["org/name"] = dict(SHARDED)
    folder = hub.resolve("org/name")
    server.requests.clear()
    assert hub.resolve("org/name") == hub.resolve("org/name", offline=True) == folder
    assert server.requests == []
    assert hub.pull("org/name") == folder
    assert server.downloads() == []
    server.repositories["org/name"]["config.json"] = b"{ }"
    newer = hub.pull("org/name")
    assert newer != folder
    assert server.downloads() == ["config.json"]
    assert (newer / "config.json").read_bytes() == b"{ }"
    assert hub.resolve("org/name") == newer


def test_a_download_that_was_cut_off_is_not_taken_for_a_model_and_goes_on(server: FakeHub) -> None:
    server.repositories["org/name"] = SHARDED
    folder = hub.resolve("org/name")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.resolve().unlink()
    assert cached_model(HubName("org/name", None)) is None
    with pytest.raises(ModelNotFoundError, match=r"not complete in the cache.*ete pull org/name"):
        hub.resolve("org/name", offline=True)
    assert hub.list_models() == []
    server.requests.clear()
    assert hub.resolve("org/name") == folder
    assert server.downloads() == ["model-00002-of-00002.safetensors"]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(server: FakeHub) -> None:
    server.repositories["org/name"] = {"only.gguf": BIG}
    server.cut_after = 1_000_000
    assert hub.resolve("org/name").read_bytes() == BIG
    assert len(server.downloads()) == 2


def test_gguf_models_are_chosen_by_file_or_format(server: FakeHub) -> None:
    server.repositories["org/name"] = GGUFS
    with pytest.raises(ModelNotFoundError, match=r"(?s)org/name:FORMAT.*m-Q4_K_M\.gguf\n  m-Q8_0\.gguf"):
        hub.resolve("org/name")
    assert server.downloads() == []
    path = hub.resolve("org/name:q4_k_m")
    assert path.read_bytes() == b"four"
    assert hub.resolve("org/name", offline=True) == path  # the only one that is here
    assert hub.resolve("org/name:m-Q8_0.gguf").read_bytes() == BIG
    with pytest.raises(ModelNotFoundError, match="2 GGUF models are there"):
        hub.resolve("org/name", offline=True)
    with pytest.raises(ModelNotFoundError, match="0 GGUF models fit 'Q5_0'"):
        hub.resolve("org/name:Q5_0")


def test_split_gguf_models_need_all_their_parts(server: FakeHub) -> None:
    parts = {f"m-F16-0000{part}-of-00003.gguf": bytes([part]) for part in (1, 2, 3)}
    server.repositories["org/name"] = parts
    path = hub.resolve("org/name:F16")
    assert path.name == "m-F16-00001-of-00003.gguf"
    assert names_in(path.parent) == sorted(parts)
    (path.parent / "m-F16-00003-of-00003.gguf").resolve().unlink()
    assert cached_model(HubName("org/name", "F16")) is None
    server.repositories["org/other"] = {"m-00001-of-00002.gguf": b""}
    with pytest.raises(ModelNotFoundError, match="lacks m-00002-of-00002"):
        hub.resolve("org/other")


def test_listing_and_removing(server: FakeHub, tmp_path: Path) -> None:
    server.repositories |= {"a/both": SHARDED | GGUFS, "b/gguf": GGUFS}
    both = hub.resolve("a/both")
    hub.resolve("b/gguf:Q8_0")
    four = hub.resolve("b/gguf:Q4_K_M")
    listed = {model.name: model for model in hub.list_models()}
    assert sorted(listed) == ["a/both", "b/gguf:m-Q4_K_M.gguf", "b/gguf:m-Q8_0.gguf"]
    assert listed["a/both"].path == both
    assert listed["a/both"].nbytes == sum(len(SHARDED[name]) for name in names_in(both))
    for name, model in listed.items():
        assert hub.resolve(name, offline=True) == model.path
    assert hub.remove("b/gguf:m-Q8_0.gguf") == len(BIG)
    assert four.read_bytes() == b"four"
    with pytest.raises(ModelNotFoundError, match="not complete"):
        hub.remove("b/gguf:m-Q8_0.gguf")
    assert hub.remove("a/both") >= len(BIG)
    assert [model.name for model in hub.list_models()] == ["b/gguf:m-Q4_K_M.gguf"]
    with pytest.raises(ModelNotFoundError, match="ete list"):
        hub.remove("a/both")


def test_what_cannot_be_run_is_refused_before_weights_are_loaded(server: FakeHub) -> None:
    server.repositories |= {
        "org/pickled": {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": BIG},
        "org/tokenizer": {"config.json": b"{}", "tokenizer.model": b"x", "model.safetensors": BIG},
        "org/bare": {"tokenizer.json": b"{}", "model.safetensors": BIG},
        "org/dataset": {"data.csv": b""},
    }
    for name, words in [("pickled", "pickled"), ("tokenizer", "tokenizer.model"), ("bare", "no config.json")]:
        with pytest.raises(UnsupportedModelError, match=words):
            hub.resolve(f"org/{name}")
    with pytest.raises(ModelNotFoundError, match="neither"):
        hub.resolve("org/dataset")
    assert server.downloads() == []


@pytest.mark.parametrize(
    "index",
    [
        b"no json",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../x.safetensors"}}',
    ],
)
def test_an_index_that_is_none_or_leaves_its_folder_is_refused(server: FakeHub, index: bytes) -> None:
    server.repositories["org/name"] = {**SHARDED, "model.safetensors.index.json": index}
    with pytest.raises(FormatError, match="index"):
        hub.resolve("org/name")


def test_access_errors_say_what_to_do(server: FakeHub) -> None:
    server.gated.add("org/gated")
    with pytest.raises(ModelNotFoundError, match=r"gated: accept its terms.*HF_TOKEN"):
        hub.resolve("org/gated")
    with pytest.raises(ModelNotFoundError, match=r"no such folder here.*no such repository.*hf auth login"):
        hub.resolve("org/missing")


def test_no_network_and_no_permission_to_use_it(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repositories["org/name"] = SHARDED
    folder = hub.resolve("org/name")
    use("http://127.0.0.1:9", tmp_path / "hf", monkeypatch)  # the discard port: nobody answers
    assert hub.resolve("org/name") == folder
    with pytest.raises(ModelNotFoundError, match=r"did not answer.*check the network"):
        hub.resolve("org/other")
    with pytest.raises(ModelNotFoundError, match="did not answer"):
        hub.pull("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("org/name") == folder
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        hub.resolve("org/other")


def test_a_full_disk_is_noticed_before_weights_are_loaded(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["org/name"] = {"only.gguf": BIG}
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(CapacityError, match=r"org/name needs 3 MiB.*HF_HOME"):
        hub.resolve("org/name")
    assert server.downloads() == []


def test_a_cache_that_cannot_be_written_is_named_instead_of_the_network(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repositories["org/m"] = {"m-Q8_0.gguf": b"GGUF"}
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    told = rf"{tmp_path}/file/hub, cannot be used: {tmp_path}/file.*: Not a directory; set HF_HOME to another folder"
    with pytest.raises(StorageError, match=told):
        hub.pull("org/m")
