"""What is asked and answered, as types: they check requests and responses, and make the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from vitral.config import TOP_K, TaskName

MAX_TEXT = 100_000

Name = Annotated[str, StringConstraints(max_length=64)]
TopK = Annotated[int, Field(ge=1, le=1000)]


class Typed(BaseModel):
    """Nothing but what is named here."""

    model_config = ConfigDict(extra="forbid", strict=True)


# ---- what is asked ----


class Asked(Typed):
    """One image."""

    image: str = Field("", description="The image file, in base64. It is never fetched from an address.")


class AskedText(Asked):
    """One image or text."""

    text: str = Field("", max_length=MAX_TEXT, description="The text, for a model that reads texts.")


class AskedOfModel(Typed):
    """Something that one model is asked."""

    model: Name = Field("", description="Name of the model; the first that is served if none is given.")


class PredictRequest(AskedOfModel, AskedText):
    """What to predict."""

    top_k: TopK = Field(TOP_K, description="Labels to answer with, where the model tells classes apart.")


class EmbedRequest(AskedOfModel, AskedText):
    """What to embed."""


class ExplainRequest(AskedOfModel, Asked):
    """What to explain, and how."""

    method: Literal["attention", "rollout", "relevance", "gradcam", "positions", "tokens", "writing"] = "attention"
    layer: int | None = Field(None, description="Attention, tokens and writing: block, from 0; the last by default.")
    head: int | None = Field(None, description="Attention and writing: one head alone.")
    target: str | None = Field(
        None, alias="class", max_length=1000, description="Class to explain, by name or number; the likeliest."
    )
    patch: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        None, description="Attention: x, y of a pixel of the prepared image; where its patch looks. In a form: X,Y."
    )
    rows: bool = Field(
        False, description="Also the prepared image, and for the attention of a ViT every row, if they are few."
    )


class SearchRequest(AskedText):
    """What to look for in the index, which has a model of its own."""

    top_k: TopK = Field(10, description="How many to find.")
    thumbnails: bool = Field(False, description="Also small pictures of what was found.")


# ---- what is answered ----


class Timing(Typed):
    """Where the time went, in milliseconds."""

    read_ms: float = Field(description="Decoding and preparing.")
    wait_ms: float = Field(description="Waiting for the batch to leave.")
    run_ms: float = Field(description="The model, for the whole batch.")
    batch: int = Field(description="How many went together.")


class Answered(Typed):
    """What every answer has."""

    model: str
    timing: Timing


class Label(Typed):
    """A class and its probability."""

    label: str
    probability: float


class Thing(Typed):
    """An object; its box is x0, y0, x1, y1 in pixels."""

    label: str
    score: float
    box: list[float]


class RunLengths(Typed):
    """A mask as COCO's run lengths: zeros and ones in turn, down the columns."""

    size: list[int]
    counts: list[int]


class Region(Typed):
    """The pixels of one class."""

    label: str
    pixels: int
    share: float
    rle: RunLengths


class WrittenText(Typed):
    """A text that was written."""

    text: str
    score: float
    ended: bool


class TaggedWord(Typed):
    """A word and its tag."""

    word: str
    tag: str
    probability: float


class Predicted(Answered):
    """What every prediction has."""

    note: str = Field("", description="What one should know about the answer.")


class Classified(Predicted):
    """The likeliest classes."""

    task: Literal["classify"]
    predictions: list[Label]


class Labelled(Predicted):
    """Labels above their thresholds, and the probability of each."""

    task: Literal["multilabel"]
    labels: list[str]
    probabilities: dict[str, float]


class Measured(Predicted):
    """Numbers by name."""

    task: Literal["regress"]
    values: dict[str, float]
    deviations: dict[str, float] | None = None


class Segmented(Predicted):
    """Height and width of the image, and where each class is."""

    task: Literal["segment"]
    size: list[int]
    classes: list[Region]


class Detected(Predicted):
    """Height and width of the image, and its objects."""

    task: Literal["detect"]
    size: list[int]
    objects: list[Thing]


class Wrote(Predicted):
    """Texts, the best first."""

    task: Literal["caption", "translate", "complete"]
    texts: list[WrittenText]


class Tagged(Predicted):
    """Words with their tags."""

    task: Literal["tag"]
    words: list[TaggedWord]


Prediction = Annotated[
    Classified | Labelled | Measured | Segmented | Detected | Wrote | Tagged, Field(discriminator="task")
]


class Embedded(Answered):
    """What the head receives."""

    embedding: list[float]


class Rows(Typed):
    """Every attention row, packed: see explanation/page.py."""

    layers: int
    heads: list[int]
    queries: int
    note: str
    largest: str
    shares: str


class Explained(Answered):
    """Maps over the patches of an image."""

    method: str
    about: str = Field(description="What the maps show, in words.")
    answer: str | None = Field(description="What the model says about the image, in words.")
    target: str | None = Field(alias="class", description="The class that is explained.")
    probability: float | None = Field(description="Of that class.")
    layer: int | None = Field(description="The block, from 0.")
    head: int | None = Field(description="The head, from 0, if one alone was asked for.")
    patch: list[int] | None = Field(description="The pixel whose patch looks, if one was asked for: x, y.")
    part: str = Field(description="The part of the image that was fed to the model, in words.")
    size: list[int] = Field(description="Height and width of the image, upright.")
    crop: list[float] = Field(
        description="The part that was fed to the model: x0, y0, x1, y1 in pixels of the image; it may include padding."
    )
    cell: list[float] = Field(
        description="Height and width of a patch, in pixels of the image; the first patch starts at x0, y0 of the crop."
    )
    grid: list[int] = Field(description="Rows and columns of patches.")
    titles: list[str] = Field(description="What each map is of.")
    scores: dict[str, float] = Field(description="How faithful the maps are, if that was measured.")
    maps: list[list[list[float]]] = Field(description="Each a list of rows of numbers, one for each patch.")
    rows: Rows | None = Field(None, description="Every attention row, if they were asked for and are few.")
    image: str | None = Field(None, description="The input of the model, as PNG in base64.")


class Found(Typed):
    """Something in the index, and how near it is: the cosine."""

    name: str = Field(description="The path below the folder that was indexed, or the text.")
    score: float
    thumbnail: str | None = Field(None, description="A small picture, JPEG in base64.")


class Searched(Answered):
    """The nearest, the nearest first."""

    matches: list[Found]


class Model(Typed):
    """A model that is served."""

    name: str
    task: TaskName
    reads: Literal["image", "text"]
    labels: list[str]
    size: list[int] | None = Field(description="Height and width that images are brought to.")
    explains: list[str] = Field(description="Ways to explain what it does.")
    blocks: int = Field(description="Blocks whose attention can be asked for.")
    cls: bool = Field(description="Whether attention is that of a [CLS] token, where no patch is asked.")


class Models(Typed):
    """What is served."""

    version: str
    models: list[Model]
    index: int | None = Field(description="How many can be searched, or null without an index.")
    index_reads: Literal["image", "text"] | None = Field(description="What it is an index of.")


class Status(Typed):
    """How the server is."""

    status: Literal["ok", "ready", "not ready"]


class ErrorDetail(Typed):
    """A code for programs, and a sentence for people: what is wrong, what was received, how to mend it."""

    code: str
    message: str


class Error(Typed):
    """What is answered when something is wrong."""

    error: ErrorDetail


def body_schema(model: type[Asked]) -> dict[str, Any]:
    """A request body for OpenAPI: JSON, or a form with the image as a file."""
    schema = model.model_json_schema()
    form = {**schema, "properties": dict(schema["properties"]), "title": f"{schema['title']}Form"}
    form["properties"]["image"] = {"type": "string", "format": "binary", "description": "The image file."}
    if "patch" in form["properties"]:
        form["properties"]["patch"] = {"type": "string", "pattern": "^[0-9]{1,6},[0-9]{1,6}$"}
        for name, kind in (("layer", "integer"), ("head", "integer"), ("class", "string")):
            form["properties"][name] = {"type": kind}
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"required": True, "content": content, "description": "Either an image or a text."}
