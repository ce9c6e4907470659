"""The published experiments on images: MCBN on CIFAR-10 and CamVid, and stochastic batch normalisation."""
