"""What the tests of drift share."""

from helpers.drift_cases import classifier as classifier
