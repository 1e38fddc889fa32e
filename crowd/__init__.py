"""One's own data: votes and candidate files in, purified labels, their review and the classifier out.

python train.py --dataset mine.csv              trains; leaves labels.csv, annotators.csv, review.html and model.pt
python -m crowd predict RUN FILES...            the model's labels for new images, or for an .npz, as CSV
python -m crowd review RUN                      review.html again, or of a run on any other dataset
"""

from crowd.caution import safe_tau
from crowd.dataset import load
from crowd.labels import Outcome, labels_csv, tables
from crowd.review import review
from crowd.votes import has_features

__all__ = ["Outcome", "has_features", "labels_csv", "load", "review", "safe_tau", "tables"]
