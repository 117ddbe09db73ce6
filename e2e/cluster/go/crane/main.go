// Command crane pushes images to registries and serves one: that of google/go-containerregistry, at a pinned version.
package main

import (
	"context"
	"os"
	"os/signal"

	"github.com/google/go-containerregistry/cmd/crane/cmd"
	"github.com/google/go-containerregistry/pkg/logs"
)

func main() {
	logs.Warn.SetOutput(os.Stderr)
	logs.Progress.SetOutput(os.Stderr)
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if cmd.Root.ExecuteContext(ctx) != nil {
		os.Exit(1)
	}
}
