from batchbayes.report.page.build import answers_alike, column_cells, render

EVIL = "</script><script>alert(1)</script>"


def column(better, **more):
    return {
        "key": "k",
        "label": EVIL,
        "meaning": EVIL,
        "better": better,
        "digits": 1,
        "percent": False,
        "target": None,
        "group": EVIL,
    } | more


def test_the_best_is_marked_whichever_way_is_better():
    def best(better, values, **more):
        return [cell.best for cell in column_cells(column(better, **more), values)]

    assert best("lower", [3.0, 1.0, 2.0]) == [False, True, False]
    assert best("higher", [3.0, 1.0, None]) == [True, False, False]
    assert best("target", [0.8, 0.93, 0.99], target=0.9, percent=True) == [False, True, False]
    assert best("lower", [1.0, None, None]) == [False, False, False]


def test_nothing_from_the_data_is_markup():
    metrics = {
        "task": "classification",
        "verdict": {"headline": EVIL, "What to do next": EVIL, EVIL: EVIL},
        "call": EVIL,
        "usable": True,
        "terms": {EVIL: EVIL},
        "recommended": EVIL,
        "caveats": [EVIL],
        "methods": [
            {"name": EVIL, "about": EVIL, "metrics": {"k": 1.0}, "settings": {"engine": EVIL, EVIL: 0.5}},
        ],
        "columns": [column("lower")],
        "figures": [],
        "thumbnails": None,
        "details": {"test-0": [EVIL]},
        "explorer": {
            "x": "entropy", "y": "mutual_information", "x_label": EVIL, "y_label": EVIL, "risk_label": EVIL,
            "kept_label": EVIL, "x_scale": "root", "y_scale": "log",
            "percent": True, "threshold": 0.1, "thresholds": [0.1], "coverage": [1.0], "risk": [0.0],
        },
        "data": {
            "test": EVIL, "train": EVIL, "ood": EVIL, "calibration": EVIL, "split_off": True, "test_count": 1,
            "calibration_count": 1, "no_novelty": EVIL,
        },
        "made": {
            "command": EVIL, "budget": None, "seed": 0, "draws": 1, "engine": EVIL, "seconds": 0, "network": EVIL,
            "versions": {EVIL: EVIL},
        },
    }  # fmt: skip
    row = {
        "source": "test", "row": "0", "target": EVIL, "prediction": EVIL, "confidence": "0.5", "std": "0",
        "entropy": "0.1", "mutual_information": "0.1", "novelty": "0.1", "flag": "1", "why": EVIL, "id": EVIL,
    }  # fmt: skip
    page = render(metrics, [row], {})
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_answers_alike_are_counted_among_the_nearest_confidences():
    rows = [
        {"source": "test", "row": str(i), "prediction": "a", "target": "a" if i % 2 else "b", "confidence": str(i / 50)}
        for i in range(50)
    ] + [
        {"source": "test", "row": str(i), "prediction": "a", "target": "a", "confidence": "0.999"}
        for i in range(50, 70)
    ]
    alike = answers_alike(rows)
    assert alike(rows[25]) == ["of 14 answers as certain as this one 7 are right"]
    assert alike(rows[-1]) == ["of 14 answers as certain as this one 14 are right"]
    assert answers_alike(rows[:4])(rows[0]) == []
