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
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/worker"
)

const (
	joinFileHelp = "file with the fleet's NATS and secret, which is followed: what a router keeps in DATA/" + fileJoin + ". Or the same text in XPYD_JOIN"
	trustMeans   = "whoever reaches a port may use it, drain it and poison its KV"
	trustHelp    = "ask nobody who comes for the fleet's secret: " + trustMeans
)

// joining is the join line that a process was given, and where it is from.
type joining struct {
	trust.Join
	file string // "": from XPYD_JOIN, and as it is
	open bool   // others may read the file
}

// readJoining reads the line; both empty is no line.
func readJoining(text, file string) (joining, error) {
	j := joining{file: file}
	key := "join"
	if file != "" {
		key = "join_file"
		var err error
		if text, j.open, err = joinFile(file); err != nil {
			return j, &config.KeyError{Key: key, Msg: err.Error()}
		}
	}
	if text == "" && file == "" {
		return j, nil
	}
	line, err := trust.ParseJoin(text)
	if err == nil && line.URL != "" {
		conn := fleet.ConnConfig{URL: line.URL, Ring: &trust.Ring{}} // who has a secret has credentials
		err = conn.Validate()
	}
	if j.Join = line; err != nil {
		return j, &config.KeyError{Key: key, Msg: strings.TrimPrefix(file+": ", ": ") + err.Error()}
	}
	return j, nil
}

// maxJoin bounds a join line.
const maxJoin = 16 << 10

// joinFile reads a file that may also be a pipe, or a link, as secrets that are
// mounted are. It says whether others can read it.
func joinFile(path string) (text string, open bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, fmt.Errorf("%w: a router makes it at its first start, as %s in its data folder", err, fileJoin)
	}
	if err != nil {
		return "", false, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", false, err
	}
	mode := info.Mode()
	if mode.IsRegular() && mode.Perm()&0o002 != 0 {
		return "", false, fmt.Errorf("%s has mode %04o, so that anybody may choose this worker's fleet: run `chmod 600 %s`", path, mode.Perm(), path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxJoin+1))
	if err == nil && len(b) > maxJoin {
		err = fmt.Errorf("%s has more than %d bytes", path, maxJoin)
	}
	return string(b), mode.IsRegular() && mode.Perm()&0o004 != 0, err
}

func (j *joining) given() bool { return len(j.Secrets) > 0 }

// ring makes the secrets usable. Without a line it is a ring that nobody else has.
func (j *joining) ring() (*trust.Ring, error) {
	if !j.given() {
		return trust.NewRing(trust.NewSecret())
	}
	return trust.NewRing(j.Secrets...)
}

// nothingElse is what a worker says to SIGHUP.
const nothingElse = "a worker has nothing to reload but its join file; restart it to change its configuration"

// followEvery is how often a join file is looked at.
const followEvery = time.Second

// follow calls apply with what the file holds whenever that has changed, and looks
// also when told to, until ctx ends. A file that is not there or that cannot be
// read changes nothing, and is said once.
func (j *joining) follow(ctx context.Context, look <-chan os.Signal, log *slog.Logger, apply func(trust.Join) error) {
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
		next, err := readJoining("", j.file)
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
			log.Warn("the join file cannot be used; what it said before stays in force", "err", err)
		}
	}
}

// ids names secrets.
func ids(secrets []trust.Secret) string {
	var out []string
	for _, s := range secrets {
		out = append(out, s.ID())
	}
	return strings.Join(out, "+")
}

// answersWhom refuses a worker that was not told whom it may answer.
func answersWhom(cfg *worker.Config, j *joining) error {
	if j.given() || cfg.TrustEveryone || cfg.APIKeysFile != "" {
		return nil
	}
	return errors.New("whom may this worker answer? --join-file FILE: the fleet of the router that keeps FILE in its data folder, as " + fileJoin +
		"; api_keys_file in --config: whoever has one of its keys; --trust-everyone: whoever reaches it")
}
