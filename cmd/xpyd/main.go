// Command xpyd serves large language models with prefill and decode on separate workers.
// Each subcommand is a file: load configuration, wire, wait, close.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/openai"
)

// Exit codes.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError marks bad usage or configuration: exit code 2.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func main() {
	ctx, stop := shutdownContext(os.Exit)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	if cut(ctx) {
		code = exitFailed
	}
	stop()
	os.Exit(code)
}

// run executes one command line and returns its exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot(stdout, stderr)
	root.SetArgs(append([]string{}, args...)) // cobra replaces nil by the process's arguments
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitDone
	}
	fmt.Fprintln(stderr, "xpyd:", err)
	var usage usageError
	if errors.As(err, &usage) {
		return exitUsage
	}
	return exitFailed
}

func newRoot(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "xpyd",
		Version:       build(),
		Short:         "Serve large language models with prefill and decode on separate workers",
		Example:       "  xpyd up                          a whole xPyD on this machine, at http://127.0.0.1:8000\n  xpyd status --watch              what runs where\n  xpyd scale prefill=3 decode=2    on a running `up`",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q%s; `xpyd --help` lists them", args[0], meantCommand(cmd, args[0]))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate(versionLine())
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if cmd == root { // the flags of a command whose name is wrong
			if args := root.Flags().Args(); len(args) > 0 {
				return root.Args(root, args)
			}
		}
		return usageError{fmt.Errorf("%w; see `%s --help`", meantFlag(cmd, wrongValue(err)), cmd.CommandPath())}
	})
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(
		newUp(), newRouter(), newWorker("prefill"), newWorker("decode"),
		newChat(), newScale(), newStatus(), newHealth(), newTop(), newTrace(), newDrain(), newUndrain(), newRole(), newMock(), newBench(), newPlan(), newReplay(), newKeys(), newSecret(), newRevoke(), newUnrevoke(), newLogLevel(), newAdmin(), newVersion(),
	)
	usageArgs(root)
	return root
}

// wrongValue says of a flag's wrong value what is wanted, instead of which Go function refused it.
func wrongValue(err error) error {
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	want := ""
	switch bad.GetFlag().Value.Type() {
	case "bool":
		want = "true or false"
	case "int", "int64":
		want = "a whole number"
	case "uint64":
		want = "a whole number, 0 or more"
	case "float64":
		want = "a number"
	case "duration":
		want = `a duration such as "3s" or "250ms"`
	default:
		return err
	}
	return fmt.Errorf("--%s: %q: want %s", bad.GetFlag().Name, openai.Clip(bad.GetValue()), want)
}

// usageArgs makes wrong arguments bad usage, for all commands below parent. A command without Args
// takes none.
func usageArgs(parent *cobra.Command) {
	for _, c := range parent.Commands() {
		check := c.Args
		if check == nil {
			check = cobra.NoArgs
		}
		c.Args = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if hint := meantCommand(cmd, args[0]); hint != "" && check(cmd, args) != nil {
					return usageError{fmt.Errorf("%s: unknown command %q%s; `%s --help` lists them", cmd.CommandPath(), args[0], hint, cmd.CommandPath())}
				}
			}
			if err := check(cmd, args); err != nil {
				return usageError{fmt.Errorf("%s: %w; see `%s --help`", cmd.CommandPath(), err, cmd.CommandPath())}
			}
			return nil
		}
		usageArgs(c)
	}
}

// shutdownContext is cancelled by the first SIGINT or SIGTERM; a second one cancels the drain that
// follows and cuts what runs. If that takes longer than lastGrace, or at a third signal, the
// process runs the lastly function and exits.
func shutdownContext(exit func(int)) (context.Context, func()) {
	now, cut := context.WithCancel(context.Background())
	d := &drain{now: now}
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), drainKey{}, d))
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for _, act := range []func(){cancel, cut} {
			select {
			case <-signals:
				act()
			case <-done:
				return
			}
		}
		timer := time.NewTimer(lastGrace)
		defer timer.Stop()
		select {
		case <-signals:
		case <-timer.C:
		case <-done:
			return
		}
		if f := d.last.Load(); f != nil {
			(*f)()
		}
		exit(exitFailed)
	})
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		watching.Wait()
		cancel()
		cut()
	}
}

// background runs f until end is called, which waits for it.
func background(f func(context.Context)) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { f(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// lastGrace is the time after a second signal to clean up processes and files.
const lastGrace = 500 * time.Millisecond

type drainKey struct{}

type drain struct {
	now  context.Context        // ends with the second signal
	last atomic.Pointer[func()] // see lastly
}

// lastly sets a quick function that runs, beside whatever still runs, before an exit that no longer
// waits.
func lastly(ctx context.Context, f func()) {
	if d, ok := ctx.Value(drainKey{}).(*drain); ok {
		d.last.Store(&f)
	}
}

// draining returns the context of a command's drain: it ends after limit or with a second signal,
// not with ctx.
func draining(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	parent := context.Background()
	if d, ok := ctx.Value(drainKey{}).(*drain); ok {
		parent = d.now
	}
	return context.WithTimeout(parent, limit)
}

// cut reports whether a second signal came.
func cut(ctx context.Context) bool {
	d, ok := ctx.Value(drainKey{}).(*drain)
	return ok && d.now.Err() != nil
}
