"""A Flower app that trains a small network on images, with FedDD in place of FedAvg."""
