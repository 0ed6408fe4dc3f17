"""The pictures of docs/tasks from finished runs: `python scripts/task_pictures.py RUN DATA docs/images/detect.png`.

Detection and segmentation: truth above, answer below, for the first test images. Several labels: answers. Regression:
told against true, and the errors. Captions and translations: where the model looks while it writes.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from PIL import Image

from vitral.data.sources.open import open_data
from vitral.explanation.explain import explain
from vitral.explanation.writing import align
from vitral.inference.predictor import Predictor
from vitral.reporting.sections import box_truth, evaluated, mask_truth
from vitral.tasks.regress import Regress

COUNT = 6


def main() -> None:
    """Run the command."""
    run, data, out = Path(sys.argv[1]), open_data(sys.argv[2]), sys.argv[3]
    predictor, shown = Predictor(run), evaluated(run, data, "test")
    if predictor.task.name in ("caption", "translate"):
        index = int(shown.kept("indices")[len(shown.kept("indices")) * 2 // 3])
        caption = predictor.task.name == "caption"
        made = explain(predictor, data.images.read(index, predictor.mode), "writing") if caption else None
        (made or align(predictor, data.lines[index])).save(out)
        return
    if isinstance(predictor.task, Regress):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        values, true = predictor.task.split(shown.kept("outputs").double())[0][:, 0], shown.kept("targets")[:, 0]
        name = predictor.task.labels[0]
        left.scatter(true, values, s=6, alpha=0.5)
        left.plot([true.min(), true.max()], [true.min(), true.max()], "--", color="grey")
        left.set(xlabel=f"true {name}", ylabel=f"told {name}", aspect="equal")
        right.hist((values - true).numpy(), bins=31)
        right.set(xlabel="told - true", ylabel="images")
    else:
        truth = {"detect": box_truth, "segment": mask_truth}.get(predictor.task.name)
        rows = 2 if truth else 1
        figure, axes = plt.subplots(rows, COUNT, figsize=(2 * COUNT, 2.15 * rows), layout="constrained", squeeze=False)
        for column, index in enumerate(shown.kept("indices")[:COUNT].tolist()):
            pixels = data.images.read(index, predictor.mode)
            image = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
            (answer,) = predictor.predict(pixels)
            if truth is not None:
                axes[0, column].imshow(truth(shown, index, image))
                axes[1, column].imshow(answer.draw(image))
            else:
                axes[0, column].imshow(image)
                axes[0, column].set_title(answer.text(), fontsize=7)
        for axis in axes.flat:
            axis.axis("off")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
