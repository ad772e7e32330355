"""Trains a classifier of scikit-learn, which MLflow's autologging logs."""

import argparse

import mlflow
import numpy as np
from sklearn.linear_model import SGDClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

mlflow.autolog(log_models=False)
draw = np.random.default_rng(0)
inputs = draw.normal(size=(200, 4))
targets = (inputs.sum(axis=1) > 0).astype(int)
model = SGDClassifier(learning_rate="constant", eta0=args.lr, random_state=0).fit(inputs[:150], targets[:150])
model.score(inputs[150:], targets[150:])
