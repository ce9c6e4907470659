"""What the tests of the service share."""

from helpers.drift_cases import classifier as classifier
