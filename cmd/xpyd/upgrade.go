package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn"
)

// fileUpgrade has the path of the binary that is to take over. It is in a file, because whoever has
// the admin token may not choose what this user executes, and this user alone writes the file.
const fileUpgrade = "upgrade-binary"

const (
	upgradeTimeout = 30 * time.Second // default, for the new workers to serve
	upgradeMost    = time.Hour        // that they may take
	versionWait    = 5 * time.Second  // for a binary to say its version
)

// upgradeCommand is `xpyd up --upgrade`.
type upgradeCommand struct {
	binary  string
	timeout time.Duration
}

// run has the `up` of a data folder upgraded, and shows how that goes.
func (c *upgradeCommand) run(cmd *cobra.Command, data string) error {
	var err error
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains([]string{"upgrade", "upgrade-timeout", "data", "config"}, f.Name) {
			err = usageError{fmt.Errorf("--%s: with --upgrade the new process has the running one's settings", f.Name)}
		}
	})
	switch {
	case err != nil:
		return err
	case c.binary == "":
		return usageError{errors.New("--upgrade: the path is empty; which binary is to take over?")}
	case c.timeout < time.Millisecond || c.timeout > upgradeMost:
		return usageError{fmt.Errorf("--upgrade-timeout %v: want 1ms to %v", c.timeout, upgradeMost)}
	}
	binary, err := exec.LookPath(c.binary)
	if err == nil {
		binary, err = filepath.Abs(binary)
	}
	if err != nil {
		return usageError{fmt.Errorf("--upgrade: %w", err)}
	}
	dir, err := datadir.Open(data)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no `xpyd up` runs on %s: say where its data folder is with --data", data)
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dir.Write(fileUpgrade, []byte(binary+"\n")); err != nil {
		return err
	}
	admin := &adminFlags{data: data}
	var s upgradeStatus
	if err := admin.call(cmd.Context(), "POST", "/admin/v1/upgrade", upgradeOrder{c.timeout.Milliseconds()}, &s); err != nil {
		return errors.Join(err, dir.Remove(fileUpgrade))
	}
	return c.watch(cmd, admin, &s)
}

// watch prints what changes until the upgrade is over.
func (c *upgradeCommand) watch(cmd *cobra.Command, admin *adminFlags, s *upgradeStatus) error {
	look := time.NewTicker(waitLook)
	defer look.Stop()
	began := time.Now()
	var told string
	var at time.Time
	var was phase
	for {
		if text := s.String(); s.under() && text != told && (s.Phase != was || time.Since(at) >= waitTell) {
			told, was, at = text, s.Phase, time.Now()
			fmt.Fprintf(cmd.ErrOrStderr(), "%5.1f s  %s\n", time.Since(began).Seconds(), text)
		}
		switch s.Phase {
		case phaseDone:
			_, err := fmt.Fprintln(cmd.OutOrStdout(), s)
			return err
		case phaseFailed:
			return errors.New(s.String())
		}
		select {
		case <-look.C:
		case <-cmd.Context().Done():
			return fmt.Errorf("no longer watching; the %s", s)
		}
		*s = upgradeStatus{}
		err := admin.call(cmd.Context(), "GET", "/admin/v1/upgrade", nil, s)
		switch {
		case errors.Is(err, syscall.ECONNREFUSED), err == nil && s.Phase == "": // nobody listens, or another one does
			return errors.New("the `xpyd up` that was to be upgraded has ended")
		case err != nil:
			return err
		}
	}
}

// upgradeOrder is the body of POST /admin/v1/upgrade.
type upgradeOrder struct {
	TimeoutMS int64 `json:"timeout_ms,omitempty"` // for the new workers to serve
}

// phase of an upgrade.
type phase string

const (
	phaseChecking phase = "checking" // the binary
	phaseStarting phase = "starting" // the new workers
	phaseTaking   phase = "taking"   // the new process takes NATS and the listeners
	phaseLeaving  phase = "leaving"  // the new one serves, the old one finishes what it has
	phaseDone     phase = "done"
	phaseFailed   phase = "failed" // the old one goes on, unless it Ends
)

// upgradeStatus is the response of GET /admin/v1/upgrade.
type upgradeStatus struct {
	Phase phase     `json:"phase,omitempty"` // "": there was none
	From  string    `json:"from,omitempty"`  // builds
	To    string    `json:"to,omitempty"`
	Began time.Time `json:"began,omitzero"`
	Took  float64   `json:"took_s,omitempty"` // once over
	Left  string    `json:"left,omitempty"`   // what is waited for
	Error string    `json:"error,omitempty"`  // why it failed
	Ends  bool      `json:"ends,omitempty"`   // it failed since the old one was stopped
}

func (s *upgradeStatus) under() bool {
	return s.Phase != "" && s.Phase != phaseDone && s.Phase != phaseFailed
}

// String is a line for people.
func (s *upgradeStatus) String() string {
	text := fmt.Sprintf("upgrade from %s to %s: ", s.From, s.To)
	switch s.Phase {
	case phaseChecking:
		text += "is it one of the same protocol?"
	case phaseStarting:
		text += "the new workers start"
	case phaseTaking:
		text += "the new workers serve; the new process takes over"
	case phaseLeaving:
		text += "the new process serves; the old one finishes"
	case phaseDone:
		return fmt.Sprintf("%sdone in %.1f s", text, s.Took)
	case phaseFailed:
		if s.Ends {
			return fmt.Sprintf("%sgiven up after %.1f s: %s", text, s.Took, s.Error)
		}
		return fmt.Sprintf("%sfailed after %.1f s, the old one goes on: %s", text, s.Took, s.Error)
	}
	if s.Left != "" {
		text += " (" + s.Left + ")"
	}
	return text
}

// saidVersion matches versionLine.
var saidVersion = regexp.MustCompile(`^xpyd (\S+), KV protocol (\d+-\d+)\n$`)

// checkBinary returns a binary's build, or an error if it cannot take over from this one.
func checkBinary(ctx context.Context, path string) (string, error) {
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%q is no absolute path", openai.Clip(path))
	}
	ctx, cancel := context.WithTimeout(ctx, versionWait)
	defer cancel()
	var text head
	cmd := exec.CommandContext(ctx, path, "version")
	cmd.Stdout, cmd.WaitDelay = &text, time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // a script's children, too
	err := cmd.Run()
	said := saidVersion.FindSubmatch(text)
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		err = fmt.Errorf("no answer within %v", versionWait)
	case err == nil && said == nil:
		err = fmt.Errorf("it says %q", openai.Clip(string(text)))
	}
	if err != nil {
		return "", fmt.Errorf("ask %s for its version: %w", path, err)
	}
	ours := fmt.Sprintf("%d-%d", kvconn.ProtocolMin, kvconn.ProtocolMax)
	if theirs := string(said[2]); theirs != ours {
		return "", fmt.Errorf("%s is xpyd %s, KV protocol %s, and this is xpyd %s, KV protocol %s: an upgrade while requests run needs the same protocol; stop this one and start the other", path, said[1], theirs, build(), ours)
	}
	return string(said[1]), nil
}

// head keeps the first KiB of an output.
type head []byte

func (h *head) Write(b []byte) (int, error) {
	*h = append(*h, b[:min(len(b), 1<<10-len(*h))]...)
	return len(b), nil
}
