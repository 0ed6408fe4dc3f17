"""A rival of benchmarks/serve.py: litserve with our predictor. Its workers import the class, hence this file."""

from typing import Any

import litserve
from fastapi import Request

from vitral import Predictor


class Served(litserve.LitAPI):
    """Decoding included, and litserve's own batching."""

    def __init__(self, source: str, engine: Any, top_k: int, **options: Any) -> None:
        super().__init__(**options)
        self.source, self.engine, self.top_k = source, engine, top_k

    def setup(self, device: str) -> None:
        """In the worker."""
        self.predictor = Predictor(self.source, engine=self.engine)

    def decode_request(self, request: Request, **options: Any) -> Any:
        """The file of a form."""
        return request["image"].file.read()  # pyright: ignore[reportIndexIssue]  # litserve hands the form over

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """As they are."""
        return inputs

    def predict(self, x: list[bytes], **options: Any) -> list[Any]:
        """Answers for a batch."""
        return [answer.content()["predictions"] for answer in self.predictor.predict(x, self.top_k)]

    def unbatch(self, output: list[Any]) -> list[Any]:
        """As they are."""
        return output

    def encode_response(self, output: Any, **options: Any) -> dict[str, Any]:
        """As the others answer."""
        return {"predictions": output}


def serve_litserve(source: str, engine: str | None, port: int, top_k: int) -> None:
    """Serve until killed."""
    api = Served(source, engine, top_k, max_batch_size=16, batch_timeout=0.004, api_path="/v1/predict")
    server = litserve.LitServer(api, accelerator="cpu", healthcheck_path="/healthz", timeout=60)
    server.run(port=port, host="127.0.0.1", generate_client_file=False, log_level="error")
