"""Thousands of broken uploads, and everything that the OpenAPI document allows or forbids: never a 5xx."""

import base64
import json
import resource
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from process import serving
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from small_server import as_form, as_json, picture

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


def resident(process):
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def broken_uploads(c):
    """Requests, each with a damaged picture, or a picture in a damaged form."""
    seeds = [picture(0, (30, 44), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    rng = np.random.default_rng(0)
    for i in range(UPLOADS):
        path = ("/v1/predict", "/v1/embed", "/v1/predict", "/v1/explain")[i % 4]
        of_form = i % 10 == 5
        data = seeds[i % len(seeds)] if of_form else mutate(seeds[i % len(seeds)], rng)
        made = c.build_request("POST", path, **(as_form if i % 2 else as_json)(data))
        body = mutate(made.read(), rng) if of_form else made.read()
        yield path, body, {"content-type": made.headers["content-type"]}


@pytest.mark.slow
def test_two_thousand_broken_uploads(runs):
    with serving(runs["classify"]) as (url, process, logged), httpx.Client(base_url=url, timeout=60) as c:
        uploads = list(broken_uploads(c))

        def send_all():
            """How often which status came, and the most memory that was taken after an upload."""
            seen, most = Counter(), 0
            for path, body, headers in uploads:
                response = c.post(path, content=body, headers=headers)
                assert response.status_code in (200, 400, 422), response.text
                if response.status_code != 200:
                    assert response.json()["error"]["message"].endswith((".", "?")), response.text
                seen[response.status_code] += 1
                most = max(most, resident(process))
            return seen, most

        seen, _ = send_all()
        again, before = send_all()  # what the largest of them takes may lie elsewhere the second time
        once_more, after = send_all()
    assert seen == again == once_more
    assert seen[200] > 50  # some damage does not matter
    assert seen[422] > 500
    assert after < before + 16 * 2**20
    assert len([line for line in logged if json.loads(line)["event"] == "request"]) == 3 * UPLOADS


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
