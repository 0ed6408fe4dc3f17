"""What the two campaigns against a server share: a small model to serve, requests as bytes, and the memory it takes."""

import base64
import json
import resource
from collections.abc import Mapping
from pathlib import Path

from vitral import create_model, save_model

BOUNDARY = "a-boundary"
HOST = "127.0.0.1"


def save_small_model(folder: Path) -> Path:
    """Write the run directory of a classifier."""
    model = create_model("vit_nano_conv_patch2_8", num_classes=10, seed=0)
    model.labels = list("0123456789")
    save_model(model, folder / "digits", layout="vitral")
    return folder / "digits"


def as_json(image: bytes) -> tuple[bytes, str]:
    """A body with an image in base64, and its type."""
    return json.dumps({"image": base64.b64encode(image).decode()}).encode(), "application/json"


def as_form(image: bytes) -> tuple[bytes, str]:
    """A body with an image as a file, and its type."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n\r\n'
    return head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={BOUNDARY}"


def request(method: str, path: str, headers: Mapping[str, object] | None = None, body: bytes = b"") -> bytes:
    """A request as it is sent."""
    lines = {"Host": HOST, **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes (Linux only)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
