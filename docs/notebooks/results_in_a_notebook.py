# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Results in a notebook
#
# Runs, predictors, answers, explanations and search results are displayed as tables and pictures, and those that are
# tables become pandas data frames with `to_pandas()`. The options of `vitral.train` are completed by the Tab key:
# `vitral.train("digits", ep<Tab>`.

# %%
from pathlib import Path

from PIL import Image

import vitral
from vitral.data.sources.digits import load_digits

# %% [markdown]
# Train on the embedded digits for two epochs. The last line of a cell is displayed: the metrics of each split, and of
# each class.

# %%
run = vitral.train("digits", out="digits-run", epochs=2, quiet=True)
run

# %%
table = run.to_pandas()
print(table.columns.tolist())
print(f"{len(table)} classes; the lowest recall is that of {table.sort_values('recall')['class'].iloc[0]}")

# %% [markdown]
# Write some digits as files, and predict.

# %%
data = load_digits()
folder = Path("digits-images")
folder.mkdir(exist_ok=True)
for i in range(8):
    Image.fromarray(data.images.read(i, "grey")[0].numpy()).save(folder / f"{i}.png")
predictor = vitral.Predictor(run)
predictor

# %%
answers = predictor.predict([folder / "0.png", folder / "1.png"], top_k=3)
answers

# %%
many = predictor.predict(folder, top_k=1)
print(many.to_pandas().groupby("label")["probability"].describe()[["count", "mean"]])
many

# %% [markdown]
# An explanation is a picture.

# %%
made = vitral.explain(predictor, folder / "0.png", "rollout")
print(f"picture: {made.save('rollout.png')}")
made

# %% [markdown]
# Matches of a search are small pictures with their cosines.

# %%
index, change = vitral.Index.build(predictor, folder, "digits.index")
print(change.added, "images in the index")
index

# %%
index.search(folder / "0.png", top_k=3)
