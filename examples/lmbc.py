"""Cluster handwritten digits into groups of equal size, and see when not to ask for that."""

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.pipeline import make_pipeline

from practicum.clustering.lmbc import LMBC

X, y = load_digits(return_X_y=True)

model = LMBC(n_clusters=10, random_state=0).fit(X / 16)
print("sizes:", model.cluster_sizes_, "entropy of the sizes:", round(model.balance_entropy_, 3))
print("adjusted Rand index:", round(adjusted_rand_score(y, model.labels_), 3))
kmeans = KMeans(10, n_init=10, random_state=0).fit_predict(X / 16)
print("that of K-means:", round(adjusted_rand_score(y, kmeans), 3))

# New points get the nearest cluster; the estimator is a transformer too, so it works anywhere in a pipeline.
print("new points:", model.predict(X[:5] / 16))
labels = make_pipeline(PCA(50, random_state=0), LMBC(10, random_state=0)).fit_predict(X / 16)
print("after PCA:", round(adjusted_rand_score(y, labels), 3))

# Where the classes are not equally large, leave the balance out.
kept = (y % 2 == 0) | (np.random.default_rng(0).random(len(y)) < 0.25)
for balance in (1.0, 0.0):
    uneven = LMBC(10, balance=balance, random_state=0).fit_predict(X[kept] / 16)
    print(f"imbalanced, balance={balance}:", round(adjusted_rand_score(y[kept], uneven), 3))
