package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/worker"
)

const (
	joinFileHelp = "file with the fleet's NATS and secret, which a router keeps as DATA/" + fileJoin + "; changes take effect. Or the same text in XPYD_JOIN"
	trustMeans   = "whoever reaches a port may use it, drain it and poison its KV"
	trustHelp    = "do not ask for the fleet's secret: " + trustMeans
)

// joining is the join line of a process, and its source.
type joining struct {
	trust.Join
	file string // "": from XPYD_JOIN, which does not change
	open bool   // others may read the file
	once bool   // the file is a pipe or the like, and read once
}

// readJoining reads the join line from text or a file; both may be empty. Until ctx ends it waits
// for a writer of a pipe; then it returns ctx's error.
func readJoining(ctx context.Context, text, file string) (joining, error) {
	if file == "" {
		return parseJoining(text, joining{})
	}
	type answer struct {
		text string
		j    joining
		err  error
	}
	read := make(chan answer, 1)
	go func() { // opening a pipe takes no deadline: after ctx the goroutine is abandoned
		var a answer
		a.text, a.j, a.err = joinFile(file, false)
		read <- a
	}()
	select {
	case <-ctx.Done():
		return joining{}, ctx.Err()
	case a := <-read:
		if a.err != nil {
			return a.j, &config.KeyError{Key: "join_file", Msg: a.err.Error()}
		}
		return parseJoining(a.text, a.j)
	}
}

func (j *joining) reread() (joining, error) {
	text, next, err := joinFile(j.file, true)
	if err != nil {
		return next, config.Bad("join_file", "%v", err)
	}
	return parseJoining(text, next)
}

func parseJoining(text string, j joining) (joining, error) {
	file, key := j.file, "join"
	if file != "" {
		key = "join_file"
	}
	if text == "" && file == "" {
		return j, nil
	}
	line, err := trust.ParseJoin(text)
	if err == nil && line.URL != "" {
		conn := fleet.ConnConfig{URL: line.URL, Ring: &trust.Ring{}} // whoever has a secret has credentials
		err = conn.Validate()
	}
	if j.Join = line; err != nil {
		return j, config.Bad(key, "%s%v", strings.TrimPrefix(file+": ", ": "), err)
	}
	return j, nil
}

const maxJoin = 16 << 10

// joinFile reads a file, which may be a link, like mounted secrets. A pipe or the like is never
// read again: that would wait for a writer that is gone.
func joinFile(path string, again bool) (text string, j joining, err error) {
	j.file = path
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("open %s: %w: a router makes it at its first start, as %s in its data folder", path, syscall.ENOENT, fileJoin)
	}
	if err != nil {
		return "", j, err
	}
	flags := os.O_RDONLY
	if j.once = !info.Mode().IsRegular(); !j.once {
		flags |= syscall.O_NONBLOCK // in case a pipe has just replaced it
	} else if again {
		return "", j, fmt.Errorf("%s is no regular file any more", path)
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return "", j, err
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return "", j, err
	}
	mode := info.Mode()
	if mode.IsRegular() == j.once {
		return "", j, fmt.Errorf("%s: it was just replaced by another file", path)
	}
	if err := chosenByUs(path, info); err != nil {
		return "", j, err
	}
	j.open = mode.IsRegular() && mode.Perm()&0o004 != 0
	b, err := io.ReadAll(io.LimitReader(f, maxJoin+1))
	if err == nil && len(b) > maxJoin {
		err = fmt.Errorf("%s has more than %d bytes", path, maxJoin)
	}
	return string(b), j, err
}

// chosenByUs refuses a file or pipe that another user may write into.
func chosenByUs(path string, info fs.FileInfo) error {
	if uid := datadir.Owner(info); uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("%s belongs to uid %d, who could choose this worker's fleet, and this is uid %d: make your own copy with mode 0600, or give its text in XPYD_JOIN", path, uid, os.Geteuid())
	}
	mode, who := info.Mode(), ""
	switch {
	case !mode.IsRegular() && mode&fs.ModeNamedPipe == 0: // a terminal's mode says who may write on it
	case mode.Perm()&0o002 != 0:
		who = "anybody"
	case mode.Perm()&0o020 != 0:
		who = "its group"
	}
	if who != "" {
		return fmt.Errorf("%s has mode %04o, so that %s could choose this worker's fleet: run `chmod 600 %s`", path, mode.Perm(), who, path)
	}
	return nil
}

func (j *joining) given() bool { return len(j.Secrets) > 0 }

// ring returns the secrets for use. Without a line it makes one that nobody else has.
func (j *joining) ring() (*trust.Ring, error) {
	if !j.given() {
		return trust.NewRing(trust.NewSecret())
	}
	return trust.NewRing(j.Secrets...)
}

// nothingElse is a worker's log line on SIGHUP.
const nothingElse = "a worker reloads only its join file; restart it to change its configuration"

// followEvery is how often a join file is checked.
const followEvery = time.Second

// follow calls apply with the file's content whenever it has changed, until ctx ends; look makes it
// check at once. A missing or unreadable file changes nothing and is logged once. Without a file,
// or with one that is read once, nothing changes.
func (j *joining) follow(ctx context.Context, look <-chan os.Signal, log *slog.Logger, apply func(trust.Join) error) {
	if j.once {
		log.Info("the join file is not a regular file: it was read once, and is not followed", "file", j.file)
	}
	for j.once || j.file == "" {
		select {
		case <-ctx.Done():
			return
		case <-look:
			log.Warn(nothingElse)
		}
	}
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	now, said := j.Join.Reveal(), ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-look:
			log.Warn(nothingElse)
		}
		next, err := j.reread()
		if err == nil && next.Join.Reveal() != now {
			now = next.Join.Reveal()
			if err = apply(next.Join); err == nil {
				log.Info("the join file has changed and is in force", "file", j.file, "secrets", ids(next.Secrets))
			}
		}
		if err == nil {
			said = ""
		} else if text := err.Error(); text != said {
			said = text
			log.Warn("the join file cannot be used; its former content stays in force", "err", err)
		}
	}
}

func ids(secrets []trust.Secret) string {
	var out []string
	for _, s := range secrets {
		out = append(out, s.ID())
	}
	return strings.Join(out, "+")
}

// answersWhom refuses a worker that was not told who may use it.
func answersWhom(cfg *worker.Config, j *joining) error {
	if j.given() || cfg.TrustEveryone || cfg.APIKeysFile != "" {
		return nil
	}
	return errors.New("whom may this worker answer? --join-file FILE: the fleet of the router that keeps FILE in its data folder, as " + fileJoin +
		"; api_keys_file in --config: whoever has one of its keys; --trust-everyone: whoever reaches it")
}
