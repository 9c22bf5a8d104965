"""Search docstrings by late interaction: index, search, add, remove, save."""

import tempfile

from practicum.datasets import docstrings
from practicum.models import load_token_encoder
from practicum.retrieval.lemur import LemurIndex, maxsim

# Any encoder with one vector per token will do. With sentence-transformers it is
# MultiVectorEncoder(...).encode_document(texts) and .encode_query(texts).
encoder = load_token_encoder()
texts = docstrings(200)
documents = encoder.encode(texts.documents, max_length=64)

index = LemurIndex.build(documents[:150], n_features=128, epochs=5, random_state=0)
index.add(documents[150:])  # a least-squares solution each, nothing is trained again
print("documents:", index.ntotal, "bytes:", index.memory())

queries = encoder.encode(texts.queries[:50])
scores, ids = index.search(queries, k=5, n_candidates=30)
exact = maxsim(queries, documents).topk(5).indices.numpy()
found = sum(len(set(a) & set(b)) for a, b in zip(ids.tolist(), exact.tolist(), strict=True)) / ids.size
print(f"recall@5 of exact MaxSim by 30 of {index.ntotal} documents: {found:.3f}")
print("query:   ", texts.queries[0])
print("document:", texts.documents[ids[0, 0]][:80])

print("removed:", index.remove_ids([0, 1, 2]))
with tempfile.TemporaryDirectory() as folder:
    index.save(folder)
    print("loaded again:", LemurIndex.load(folder).ntotal, "documents")
