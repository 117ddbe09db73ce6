"""The product on a cluster, as a user installs and uses it: charts, samples, requests through the gate."""
