"""Thousands of broken uploads, and everything that the OpenAPI document allows or forbids: never a 5xx."""

import base64
import ctypes
import gc
import json
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from process import serving
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from small_server import as_form, as_json, client, picture

UPLOADS = 2000


def mutate(data, rng):
    """One kind of damage: bytes changed, cut out, doubled or put in, or the end cut off."""
    data = bytearray(data)
    place, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
    match rng.integers(6):
        case 0:
            for i in rng.integers(0, len(data), int(rng.integers(1, 20))):
                data[i] = rng.integers(256)
        case 1:
            del data[place : place + length]
        case 2:
            data[place:place] = data[place : place + length]
        case 3:
            data[place:place] = rng.bytes(length)
        case 4:
            del data[place:]
        case 5:
            data[place : place + 4] = b"\xff\xff\xff\xff"
    return bytes(data)


def memory():
    """Resident memory of this process now, in bytes, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_two_thousand_broken_uploads(runs):
    seeds = [picture(0, (30, 44), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    rng, seen = np.random.default_rng(0), {}
    with client({"m": runs["classify"]}) as c:
        for i in range(UPLOADS):
            data = mutate(seeds[i % len(seeds)], rng)
            send = (as_form if i % 2 else as_json)(data)
            if i % 5 == 0 and "files" in send:  # damage to the form rather than to the picture
                made = c.build_request("POST", "/v1/predict", **send)
                body = mutate(made.read(), rng)
                send = {"content": body, "headers": {"content-type": made.headers["content-type"]}}
            path = ("/v1/predict", "/v1/embed", "/v1/predict", "/v1/explain")[i % 4]
            response = c.post(path, **send)
            assert response.status_code in (200, 400, 422), (i, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"].endswith((".", "?")), response.text
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            if i == UPLOADS // 4:
                before = memory()
        after = memory()
        assert c.post("/v1/predict", **as_form(seeds[0])).status_code == 200
    assert seen[200] > 50  # some damage does not matter
    assert seen[422] > 500
    assert after < before + 24 * 2**20


def with_picture(case):
    """The same request, about a picture that can be read, for a model that is there."""
    data = picture()
    image = base64.b64encode(data).decode() if case.media_type == "application/json" else data
    return {name: value for name, value in case.body.items() if name not in ("model", "text")} | {"image": image}


def check(operation, mode):
    """Many requests to one address, valid or not, and whether each answer is as the document says."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    def ask(case):
        left_out = [positive_data_acceptance]  # a valid request may ask for a layer that is not there: refused
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = with_picture(case)
            left_out.append(negative_data_rejection)  # bytes are no JSON, and so not valid to it
        case.call_and_validate(excluded_checks=left_out)

    ask()


@pytest.mark.slow
def test_the_openapi_document_is_kept(runs):
    with serving(runs["classify"], runs["translate"]) as (url, _, logged):
        checked = 0
        for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
            operation = result.ok()
            check(operation, GenerationMode.POSITIVE)
            if operation.method == "post":  # the others take nothing that could be wrong
                check(operation, GenerationMode.NEGATIVE)
            checked += 1
    assert checked == 8
    assert [line for line in logged if not line.startswith("{")] == []
    lines = [line for line in map(json.loads, logged) if line.get("event") == "request"]
    answered = Counter((line["path"], line["status"]) for line in lines)
    for path in ("/v1/predict", "/v1/embed", "/v1/explain"):
        assert answered[path, 200], answered
        assert answered[path, 422], answered
    assert answered["/v1/search", 404]  # there is no index
