"""What scikit-learn's 3-NN and RBF-SVM reach on the digits, on the split that vitral trains on.

python benchmarks/digits_baselines.py
"""

from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from vitral.data.sources.base import ImageArray
from vitral.data.sources.digits import load_digits


def main() -> None:
    data = load_digits()
    assert isinstance(data.inputs, ImageArray)
    pixels = (data.inputs.pixels.view(-1, 64).double() * 16 / 255).round().numpy()
    labels, train, test = data.targets.numpy(), data.splits["train"].numpy(), data.splits["test"].numpy()
    svm = SVC(gamma=0.001, C=10)  # pyright: ignore[reportArgumentType]  # a number is allowed, the stub says a word
    for name, model in (("3-NN", KNeighborsClassifier(3)), ("RBF-SVM, gamma 0.001, C 10", svm)):
        score = model.fit(pixels[train], labels[train]).score(pixels[test], labels[test])
        print(f"{name:28} {100 * score:.2f} % of {len(test)} test images")


if __name__ == "__main__":
    main()
