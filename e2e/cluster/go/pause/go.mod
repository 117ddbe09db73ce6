module kvstrata.io/e2e/cluster/pause

go 1.21
