"""LMBC: large-scale manifold balanced clustering.

K-means without centroids: the labels themselves make the similarity graph (points of one cluster are alike), and the
distance between points is any one chosen. Here it is the distance that a few hundred anchors induce, smoothed by
diffusion, so that curved clusters are found at a cost linear in the number of points; and a Schatten p-norm of the
label matrix, which is largest for clusters of equal size, keeps them balanced.
"""

from practicum.toolbox.extras import requires

with requires("clustering", "lmbc"):
    from practicum.clustering.lmbc.anchors import anchor_distance, anchor_graph
    from practicum.clustering.lmbc.estimator import LMBC
    from practicum.clustering.lmbc.measures import balance_entropy, schatten_norm

__all__ = ["LMBC", "anchor_distance", "anchor_graph", "balance_entropy", "schatten_norm"]
