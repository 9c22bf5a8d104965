"""Arms that raise, return NaN, are not installed, or lack a metric."""

from practicum.checks import Check, Comparison, Metrics, Unavailable, arm


class BrokenCheck(Check):
    comparisons = (
        Comparison("over-the-broken", metric="score", arm="sound", against="raises", difference_above=0.0),
        Comparison("over-nothing", metric="score", arm="sound", against="nan", difference_above=0.0),
        Comparison("over-the-absent", metric="score", arm="sound", against="absent", difference_above=0.0),
        Comparison(
            "over-the-best-there-is", metric="score", arm="sound", against=("absent", "sound-too"), difference_above=0.0
        ),
        Comparison("unmeasured", metric="truth", arm="sound", value_at_least=0.0),
    )
    seeds = {"quick": 3, "full": 3}

    def prepare(self, request):
        return request.seed

    @arm("raises")
    def raises(self, seed):
        raise ZeroDivisionError("nothing to divide by")

    @arm("nan")
    def nan(self, seed):
        return {"score": float("nan")}

    @arm("absent")
    def absent(self, seed):
        raise Unavailable("it is not installed here")

    @arm("sound")
    def sound(self, seed):
        return Metrics({"score": 1.0 + seed}, missing={"truth": "needs labels"})

    @arm("sound-too")
    def sound_too(self, seed):
        return {"score": 0.5}
