"""One's own data: votes and candidate files in, purified labels, their review and the classifier out.

python train.py --dataset mine.csv              trains; leaves labels.csv, annotators.csv, review.html and model.pt
python train.py --dataset mine.csv --decisions decisions.csv    the same with what was decided on that page
python -m crowd predict RUN FILES...            the model's labels for new images, or for an .npz, as CSV
python -m crowd review RUN                      review.html again, or of a run on any other dataset
"""

from crowd.caution import look
from crowd.dataset import count, has_features, load
from crowd.decisions import score
from crowd.frames import consensus, read  # `consensus` is this function, not the module
from crowd.labels import Outcome, labels_csv, tables
from crowd.page import part_of_report
from crowd.review import review

__all__ = [
    "Outcome",
    "consensus",
    "count",
    "has_features",
    "labels_csv",
    "load",
    "look",
    "part_of_report",
    "read",
    "review",
    "score",
    "tables",
]
