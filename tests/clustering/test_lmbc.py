"""LMBC as an estimator, and the identities it rests on."""

import itertools
import pickle
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits, make_blobs, make_circles
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import adjusted_rand_score, confusion_matrix
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator
from threadpoolctl import threadpool_limits

from practicum.clustering.lmbc import LMBC, anchor_distance, anchor_graph, balance_entropy, schatten_norm
from practicum.clustering.lmbc.anchors import normalize


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return X / 16, y


@pytest.fixture(scope="module")
def small():
    return np.random.default_rng(0).normal(size=(120, 3))


def fitted_quietly(model, X):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model.fit(X)


def normalized_graph(X, m=20, s=4):
    return normalize(anchor_graph(X, X[:m], s))[0]


def label_matrix(labels, c):
    return np.eye(c)[labels]


# The estimator as a part of scikit-learn


def test_scikit_learns_own_battery():
    outcomes = check_estimator(LMBC(), on_skip=None)
    assert len(outcomes) > 40
    left_out = [o["check_name"] for o in outcomes if o["status"] != "passed"]
    assert set(left_out) <= {"check_array_api_input"}  # scikit-learn leaves it out unless SCIPY_ARRAY_API is set


def test_clone_keeps_parameters_and_pickle_keeps_predictions(small):
    model = LMBC(3, n_anchors=20, diffusion=2, balance=0.5, random_state=1)
    assert clone(model).get_params() == model.get_params()
    model.fit(small)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(small), model.predict(small))
    np.testing.assert_array_equal(again.transform(small), model.transform(small))


def test_in_a_pipeline_and_a_grid_search(digits):
    X, y = digits[0][:400], digits[1][:400]
    labels = make_pipeline(PCA(20), LMBC(10, balance=0.0, random_state=0)).fit_predict(X)
    assert labels.shape == (400,)
    search = GridSearchCV(
        make_pipeline(PCA(20, random_state=0), LMBC(10, random_state=0)),
        {"lmbc__balance": [0.0, 1.0]},
        scoring="adjusted_rand_score",
        cv=2,
    ).fit(X, y)
    assert search.best_score_ > 0.5


def test_output_dtypes_shapes_and_names(small):
    for dtype in (np.float32, np.float64):
        model = LMBC(3, random_state=0).fit(small.astype(dtype))
        assert model.labels_.dtype == model.predict(small).dtype == np.int32
        coordinates = model.transform(small.astype(dtype))
        assert coordinates.dtype == dtype
        assert coordinates.shape == (120, 15)
        assert list(model.get_feature_names_out()[:2]) == ["lmbc0", "lmbc1"]
        assert model.anchors_.shape[1] == model.n_features_in_ == 3
        assert model.cluster_sizes_.sum() == 120
        np.testing.assert_array_equal(model.cluster_sizes_, np.bincount(model.labels_, minlength=3))
        assert model.objective_ == model.objective_path_[-1]
        assert model.balance_entropy_ == balance_entropy(model.labels_, 3)


def test_predict_and_transform_do_not_depend_on_batches(digits):
    X = digits[0]
    model = LMBC(10, random_state=0).fit(X)
    labels, coordinates = model.predict(X), model.transform(X)
    model.set_params(batch_size=100)
    np.testing.assert_array_equal(model.predict(X), labels)
    np.testing.assert_allclose(model.transform(X), coordinates, atol=1e-12)
    assert np.mean(labels == model.labels_) > 0.9  # border points may differ: predict has no size term


def test_predict_on_held_out_digits(digits):
    X, y = digits
    held_out = np.random.default_rng(0).permutation(len(X)) < 400
    model = LMBC(10, random_state=0).fit(X[~held_out])
    assert adjusted_rand_score(y[held_out], model.predict(X[held_out])) > 0.7


def test_same_random_state_same_labels_whatever_the_threads(digits):
    found = []
    for threads in (1, 2, 1):
        with threadpool_limits(threads):
            found.append(LMBC(10, random_state=3).fit(digits[0]).labels_)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


# The anchor graph and the distance it induces


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(12, 80), s=st.integers(1, 10), scale=st.sampled_from([1e-9, 1.0, 1e9]))
def test_a_is_doubly_stochastic_and_d_is_the_distance_of_its_rows(seed, n, s, scale):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3)) * scale
    X[n // 2 :] = X[: n - n // 2]  # duplicates
    B = anchor_graph(X, X[:11], s, batch_size=7)
    assert B.shape == (n, 11)
    assert B.nnz == n * s
    assert B.data.min() >= 0
    np.testing.assert_allclose(B.sum(axis=1), 1.0, atol=1e-12)
    R, _ = normalize(B)
    A = (R @ R.T).toarray()
    np.testing.assert_allclose(A.sum(axis=0), 1.0, atol=1e-10)
    np.testing.assert_allclose(A.sum(axis=1), 1.0, atol=1e-10)
    D = anchor_distance(R)
    dense = cdist(R.toarray(), R.toarray(), "sqeuclidean")
    np.testing.assert_allclose(D @ np.eye(n), dense, atol=1e-10)
    np.testing.assert_allclose(D.T @ np.ones(n), dense.sum(axis=0), atol=1e-9)
    np.testing.assert_allclose(anchor_distance(R.toarray()) @ np.eye(n), dense, atol=1e-10)


def test_anchor_graph_is_the_closed_form():
    rng = np.random.default_rng(4)
    X, anchors, s = rng.normal(size=(30, 4)), rng.normal(size=(9, 4)), 3
    B = anchor_graph(X, anchors, s).toarray()
    distances = cdist(X, anchors, "sqeuclidean")
    for row, d in zip(B, distances, strict=True):
        order = np.argsort(d)
        d_far = d[order[s]]
        expected = np.zeros(9)
        expected[order[:s]] = (d_far - d[order[:s]]) / (s * d_far - d[order[:s]].sum())
        np.testing.assert_allclose(row, expected, atol=1e-12)


def test_anchor_graph_with_ties_weighs_all_the_same():
    anchors = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    B = anchor_graph(np.zeros((2, 2)), anchors, 3)
    np.testing.assert_array_equal(B.data, np.full(6, 1 / 3))


def test_anchor_graph_keeps_its_digits_far_from_the_origin(small):
    near = anchor_graph(small, small[:20], 4).toarray()
    far = anchor_graph(small + 1e6, small[:20] + 1e6, 4).toarray()
    np.testing.assert_allclose(far, near, atol=1e-7)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_coordinates_have_the_gram_matrix_a_to_the_t(small, t):
    model = LMBC(3, n_anchors=20, diffusion=t, random_state=0)
    m = len(model.fit(small).anchors_)
    model.set_params(n_components=m).fit(small)
    R, _ = normalize(anchor_graph(small, model.anchors_, 5))
    A = (R @ R.T).toarray()
    E = model.transform(small)
    np.testing.assert_allclose(E @ E.T, np.linalg.matrix_power(A, t), atol=1e-10)


# The objective


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.sampled_from([0.5, 1.0, 1.5]))
def test_schatten_norm_is_that_of_the_singular_values(labels, p):
    sigma = np.linalg.svd(label_matrix(labels, 6), compute_uv=False)
    expected = np.sum(sigma[sigma > 1e-9] ** p)
    sizes = np.bincount(labels)
    np.testing.assert_allclose(expected, np.sum(sizes[sizes > 0] ** (p / 2)), rtol=1e-9)
    np.testing.assert_allclose(schatten_norm(labels, p) ** p, expected, rtol=1e-9)
    np.testing.assert_allclose(schatten_norm(label_matrix(labels, 6), p) ** p, expected, rtol=1e-9)


def test_schatten_norm_of_a_relaxed_label_matrix():
    Y = np.random.default_rng(0).random((7, 3))
    np.testing.assert_allclose(schatten_norm(Y, 1), np.linalg.norm(Y, "nuc"), rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.sampled_from([0.5, 1.0, 1.5]))
def test_schatten_norm_is_largest_for_equal_sizes_and_smallest_for_one_cluster(labels, p):
    n = len(labels)
    equal, one = np.arange(n) % 5, np.zeros(n, dtype=int)
    assert schatten_norm(one, p) <= schatten_norm(labels, p) * (1 + 1e-12)
    assert schatten_norm(labels, p) <= schatten_norm(equal, p) * (1 + 1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_entropy_is_one_only_for_equal_sizes(labels):
    entropy = balance_entropy(labels, 4)
    sizes = np.bincount(labels, minlength=4)
    assert 0 <= entropy <= 1
    assert (entropy > 1 - 1e-12) == (sizes.min() == sizes.max())
    assert (entropy < 1e-12) == (sizes.max() == len(labels))


def test_half_trace_equals_the_inertia_of_the_rows(small):
    R = normalized_graph(small)
    labels = np.random.default_rng(1).integers(0, 4, len(small))
    Y = label_matrix(labels, 4)
    F = Y / np.sqrt(Y.sum(axis=0))
    rows = R.toarray()
    inertia = sum(np.sum((rows[labels == k] - rows[labels == k].mean(axis=0)) ** 2) for k in range(4))
    np.testing.assert_allclose(0.5 * np.trace(F.T @ (anchor_distance(R) @ F)), inertia, atol=1e-10)


PLAIN_KMEANS = {"diffusion": 1, "balance": 0.0, "tol": 0.0}


def test_without_balance_it_is_at_least_as_good_as_kmeans_on_r_from_the_same_start(digits):
    X = digits[0][:900]
    anchors = LMBC(10, n_anchors=100, max_iter=1, random_state=0).fit(X).anchors_
    plain = {**PLAIN_KMEANS, "anchor_init": anchors, "n_components": len(anchors)}
    R = normalize(anchor_graph(X, anchors, 5))[0].toarray()
    start = KMeans(10, n_init=1, max_iter=2, random_state=0).fit_predict(R)
    centers = np.array([R[start == k].mean(axis=0) for k in range(10)])
    lloyd = KMeans(10, init=centers, n_init=1, max_iter=500, tol=0).fit(R)
    model = LMBC(10, init=start, random_state=0, **plain).fit(X)
    assert model.objective_ <= lloyd.inertia_ + 1e-9


def test_without_balance_it_goes_on_where_kmeans_on_r_ends(small):
    R = normalized_graph(small, s=5).toarray()
    improved = 0
    for seed in range(10):
        lloyd = KMeans(4, n_init=1, max_iter=500, tol=0, random_state=seed).fit(R)
        model = LMBC(
            4, init=lloyd.labels_, anchor_init=small[:20], n_components=20, random_state=seed, **PLAIN_KMEANS
        ).fit(small)
        np.testing.assert_allclose(model.objective_path_[0], lloyd.inertia_, atol=1e-9)
        assert model.objective_ <= lloyd.inertia_ + 1e-9
        improved += model.objective_ < lloyd.inertia_ - 1e-6
    assert improved > 0


def test_balance_weight_has_the_unit_it_promises(small):
    """At equal sizes a point more in a cluster is worth the mean variance of a point."""
    m = 20
    for p, t in itertools.product((0.5, 1.0, 1.5), (1, 3)):
        model = LMBC(3, anchor_init=small[:m], n_components=m, p=p, diffusion=t, random_state=0).fit(small)
        E = model.transform(small)
        variance = np.mean(np.sum((E - E.mean(axis=0)) ** 2, axis=1))
        marginal = model.balance_weight_ * (p / 2) * (len(small) / 3) ** (p / 2 - 1)
        np.testing.assert_allclose(marginal, variance, rtol=1e-9)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5])
def test_best_of_random_starts_is_the_optimum_over_all_labelings(p):
    labelings = np.array(list(itertools.product([0, 1], repeat=9)))[1:]
    labelings = np.hstack([np.zeros((len(labelings), 1), dtype=int), labelings])
    for problem in range(20):
        X = np.random.default_rng(problem).normal(size=(10, 2))
        model = LMBC(
            2, p=p, n_neighbors=3, n_anchors=6, anchor_init="random", init="random", n_init=20, random_state=problem
        ).fit(X)
        D = cdist(*[model.transform(X)] * 2, "sqeuclidean")
        J = np.zeros(len(labelings))
        for k in (0, 1):
            members = (labelings == k).astype(float)
            sizes = members.sum(axis=1)
            J += 0.5 * np.einsum("ij,jk,ik->i", members, D, members) / sizes
            J -= model.balance_weight_ * sizes ** (p / 2)
        np.testing.assert_allclose(model.objective_, J.min(), rtol=1e-9, atol=1e-12)


def test_objective_never_rises_and_no_cluster_is_empty():
    rises = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        n, c = int(rng.integers(30, 200)), int(rng.integers(2, 7))
        X = rng.normal(size=(n, int(rng.integers(1, 5)))) + 2 * rng.integers(0, 3, size=(n, 1))
        model = LMBC(
            c,
            n_anchors=max(c, 10),
            p=float(rng.uniform(0.2, 1.8)),
            balance=float(rng.choice([0.0, 0.3, 1.0, 30.0])),
            init=rng.integers(0, rng.integers(1, c + 1), n),
            anchor_init="random",
            random_state=seed,
        ).fit(X)
        path = np.array(model.objective_path_)
        assert len(path) > 1
        rises += int(np.any(np.diff(path) > 0))
        assert model.cluster_sizes_.sum() == n
        assert model.cluster_sizes_.min() >= 1
    assert rises == 0


def test_the_descent_ends_where_no_single_move_lowers_j(small):
    model = LMBC(3, anchor_init=small[:20], n_components=20, init="random", tol=0.0, max_iter=500, random_state=0)
    model.fit(small)
    E = model.transform(small)

    def J(labels):
        sizes = np.bincount(labels, minlength=3)
        sums = label_matrix(labels, 3).T @ E
        return np.sum(E**2) - np.sum(np.sum(sums**2, axis=1) / sizes) - model.balance_weight_ * np.sum(sizes**0.5)

    np.testing.assert_allclose(J(model.labels_), model.objective_, rtol=1e-10)
    for i, k in itertools.product(range(len(small)), range(3)):
        moved = model.labels_.copy()
        moved[i] = k
        assert J(moved) >= model.objective_ - 1e-9


# What balance does


def test_heavy_balance_makes_sizes_equal(small):
    for c in (2, 3, 8):
        model = LMBC(c, balance=1e6, random_state=0).fit(small)
        assert np.ptp(model.cluster_sizes_) <= 1
    skewed = np.zeros(120, dtype=int)
    skewed[:4] = [0, 1, 2, 3]
    model = LMBC(4, balance=1e6, init=skewed, random_state=0).fit(small)
    assert np.ptp(model.cluster_sizes_) <= 1


def test_entropy_does_not_fall_with_balance(digits):
    entropies = [
        LMBC(10, balance=b, random_state=0).fit(digits[0]).balance_entropy_ for b in (0.0, 0.3, 1.0, 3.0, 10.0)
    ]
    assert all(b >= a - 0.005 for a, b in itertools.pairwise(entropies))
    assert entropies[-1] > entropies[0] + 0.005


def test_digits_are_found_and_balanced(digits):
    X, y = digits
    models = [LMBC(10, random_state=seed).fit(X) for seed in range(5)]
    tables = [confusion_matrix(y, model.labels_) for model in models]
    accuracies = [t[linear_sum_assignment(-t)].sum() / len(y) for t in tables]
    assert np.mean(accuracies) >= 0.88
    assert np.mean([model.balance_entropy_ for model in models]) >= 0.99


# Curved and separated clusters


def test_concentric_circles_where_kmeans_fails():
    X, y = make_circles(2000, factor=0.5, noise=0.03, random_state=0)
    assert adjusted_rand_score(y, LMBC(2, random_state=0).fit_predict(X)) >= 0.99
    assert adjusted_rand_score(y, KMeans(2, n_init=3, random_state=0).fit_predict(X)) < 0.1


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_components_of_a_disconnected_graph_are_found_exactly(balance):
    X, y = make_blobs(600, centers=[[0, 0], [100, 0], [0, 100]], random_state=0)
    model = fitted_quietly(LMBC(3, balance=balance, random_state=0), X)
    assert adjusted_rand_score(y, model.labels_) == 1.0
    assert adjusted_rand_score(y, model.predict(X)) == 1.0


def test_row_order_does_not_matter(digits):
    X, start = digits[0][:600], LMBC(10, random_state=0).fit(digits[0][:600])
    order = np.random.default_rng(0).permutation(600)
    fixed = {"anchor_init": start.anchors_, "random_state": 1}
    plain = LMBC(10, init=start.labels_, **fixed).fit(X)
    permuted = LMBC(10, init=start.labels_[order], **fixed).fit(X[order])
    assert adjusted_rand_score(plain.labels_[order], permuted.labels_) == 1.0


@pytest.mark.parametrize(("scale", "dtype"), [(1e12, np.float64), (1e-12, np.float64), (2.0**40, np.float32)])
def test_the_unit_of_the_data_does_not_matter(digits, scale, dtype):
    X = digits[0][:600].astype(dtype)
    plain = LMBC(10, random_state=0).fit(X).labels_
    scaled = LMBC(10, random_state=0).fit(X * dtype(scale)).labels_
    np.testing.assert_array_equal(plain, scaled)


# Starts


@pytest.mark.parametrize("anchor_init", ["kmeans", "k-means++", "random"])
@pytest.mark.parametrize("init", ["spectral", "kmeans", "random"])
def test_every_start_gives_a_partition(digits, anchor_init, init):
    X, y = digits[0][:500], digits[1][:500]
    model = LMBC(10, anchor_init=anchor_init, init=init, random_state=0).fit(X)
    assert set(model.labels_) == set(range(10))
    assert adjusted_rand_score(y, model.labels_) > 0.4


def test_more_starts_never_end_higher(small):
    one = LMBC(4, init="random", n_init=1, random_state=0).fit(small)
    ten = LMBC(4, init="random", n_init=10, random_state=0).fit(small)
    assert ten.objective_ <= one.objective_


def test_empty_clusters_of_a_given_start_get_points(small):
    model = LMBC(5, init=np.zeros(120, dtype=int), balance=0.0, random_state=0).fit(small)
    assert model.cluster_sizes_.min() >= 1


def test_memory_does_not_grow_with_the_square_of_the_rows():
    n, d = 12_000, 8
    X = np.random.default_rng(0).normal(size=(n, d))
    model = LMBC(4, n_anchors=64, batch_size=1024, max_iter=3, random_state=0)
    tracemalloc.start()
    model.fit(X)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6 < n * n / 4


# Bad input


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"n_clusters": 0}, "n_clusters"),
        ({"n_clusters": 121}, "n_clusters"),
        ({"n_clusters": 2.5}, "n_clusters"),
        ({"n_clusters": True}, "n_clusters"),
        ({"n_anchors": 2}, "n_anchors"),
        ({"n_anchors": 121}, "n_anchors"),
        ({"n_anchors": "many"}, "n_anchors"),
        ({"n_neighbors": 0}, "n_neighbors"),
        ({"n_neighbors": 120}, "n_neighbors"),
        ({"n_neighbors": 40, "n_anchors": 40}, "n_neighbors"),
        ({"n_neighbors": 10, "n_anchors": 10}, "n_neighbors"),
        ({"p": 0}, "p must"),
        ({"p": -1.0}, "p must"),
        ({"p": 2}, r"p must.*p=2 every partition has the norm n"),
        ({"p": 2.5}, "p must"),
        ({"balance": -0.1}, "balance"),
        ({"balance": np.inf}, "balance"),
        ({"diffusion": 0}, "diffusion"),
        ({"diffusion": 1.5}, "diffusion"),
        ({"n_components": 0}, "n_components"),
        ({"n_components": 200}, "n_components"),
        ({"anchor_init": "grid"}, "anchor_init"),
        ({"anchor_init": np.zeros((10, 2))}, "anchor_init"),
        ({"anchor_init": np.zeros((2, 3))}, "anchor_init"),
        ({"init": "best"}, "init"),
        ({"init": np.zeros(7, dtype=int)}, "init"),
        ({"init": np.full(120, 3)}, "init"),
        ({"init": np.zeros(120)}, "init"),
        ({"n_init": 0}, "n_init"),
        ({"max_iter": 0}, "max_iter"),
        ({"tol": -1e-3}, "tol"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_a_parameter_out_of_range_is_named(small, parameters, named):
    with pytest.raises(ValueError, match=named):
        LMBC(**{"n_clusters": 3, **parameters}).fit(small)


def test_data_that_cannot_be_clustered(small):
    for bad in (np.nan, np.inf):
        X = small.copy()
        X[3, 1] = bad
        with pytest.raises(ValueError, match="NaN" if np.isnan(bad) else "infinity"):
            LMBC(3).fit(X)
    with pytest.raises(ValueError, match="Expected 2D array"):
        LMBC(3).fit(small[:, 0])
    with pytest.raises(NotFittedError):
        LMBC(3).predict(small)
    with pytest.raises(NotFittedError):
        LMBC(3).transform(small)
    model = LMBC(3, random_state=0).fit(small)
    with pytest.raises(ValueError, match="X has 2 features, but LMBC is expecting 3"):
        model.predict(small[:, :2])
    X = small.copy()
    X[0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        model.predict(X)


def test_sparse_data_are_refused(small):
    from scipy import sparse

    with pytest.raises(TypeError, match="[Ss]parse data was passed"):
        LMBC(3).fit(sparse.csr_array(small))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: schatten_norm([0, 1], 0), "p must"),
        (lambda: schatten_norm([0.5, 1.0], 1), "labels must"),
        (lambda: schatten_norm([-1, 1], 1), "labels must"),
        (lambda: schatten_norm([[np.nan, 1]], 1), "labels must"),
        (lambda: balance_entropy([0, 3], 3), "labels must"),
        (lambda: balance_entropy([0, 0], 0), "n_clusters must"),
        (lambda: balance_entropy([], 2), "labels must"),
        (lambda: anchor_graph(np.zeros((3, 2)), np.zeros((3, 1)), 1), "anchors must"),
        (lambda: anchor_graph(np.zeros((3, 2)), np.zeros((3, 2)), 3), "n_neighbors must"),
        (lambda: anchor_graph(np.zeros((3, 2)), np.zeros((3, 2)), 0), "n_neighbors must"),
        (lambda: anchor_distance([[np.nan]]), "R contains NaN"),
    ],
)
def test_bad_arguments_of_the_functions_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


# Edge cases


def test_one_cluster(small):
    model = fitted_quietly(LMBC(1), small)
    assert not model.labels_.any()
    assert not model.predict(small).any()
    assert model.balance_entropy_ == 1.0
    assert model.transform(small).shape == (120, 1)


def test_as_many_clusters_as_rows(small):
    X = small[:30]
    model = fitted_quietly(LMBC(30), X)
    np.testing.assert_array_equal(model.labels_, np.arange(30))
    np.testing.assert_array_equal(model.predict(X + 1e-9), np.arange(30))
    assert model.transform(X).shape == (30, 30)


def test_fewer_distinct_rows_than_clusters():
    X = np.repeat([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [5, 7, 9], axis=0)
    with pytest.warns(ConvergenceWarning, match="3 distinct rows, fewer than n_clusters=6"):
        model = LMBC(6, random_state=0).fit(X)
    np.testing.assert_array_equal(model.cluster_sizes_, [5, 7, 9, 0, 0, 0])
    np.testing.assert_array_equal(model.predict(X), model.labels_)
    exact = fitted_quietly(LMBC(3), X)
    np.testing.assert_array_equal(exact.cluster_sizes_, [5, 7, 9])


def test_many_duplicates_beside_enough_distinct_rows():
    rng = np.random.default_rng(0)
    X = np.concatenate([np.repeat(rng.normal(size=(12, 2)), 40, axis=0), rng.normal(size=(20, 2))])
    model = LMBC(4, random_state=0).fit(X)
    assert model.cluster_sizes_.min() >= 1
    assert len(np.unique(model.anchors_, axis=0)) == len(model.anchors_)
    assert np.isfinite(model.transform(X)).all()


def test_constant_rows_are_split_evenly_or_not_at_all():
    X = np.full((40, 3), 2.0)
    with pytest.warns(ConvergenceWarning, match="1 distinct rows"):
        models = [LMBC(4, random_state=5).fit(X) for _ in range(2)]
    np.testing.assert_array_equal(models[0].labels_, models[1].labels_)
    np.testing.assert_array_equal(models[0].cluster_sizes_, [10, 10, 10, 10])
    with pytest.warns(ConvergenceWarning):
        unbalanced = LMBC(4, balance=0.0).fit(X)
    assert not unbalanced.labels_.any()
    assert not models[0].predict(X).any()
