"""End-to-end tests of the product and the local cluster that they run on."""
