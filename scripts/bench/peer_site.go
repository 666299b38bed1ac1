package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

// site is a router, for its NATS, and two workers.
type site struct {
	o      *options
	dir    string
	procs  []*process
	admin  string
	token  string
	secret trust.Secret
	giver  *fleet.Member
	taker  *fleet.Member
	exact  bool // answers have to be those computed, to the token
}

type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it was waited for
}

// patience bounds what has to come: loading a model, and a fetch on a starved machine.
const patience = 3 * time.Minute

// open starts all of it; close also what a failed one has left.
func (o *options) open(ctx context.Context, dir string, invariant bool) (*site, error) {
	s := &site{o: o, dir: dir, exact: invariant}
	if err := os.RemoveAll(filepath.Join(dir, "data")); err != nil {
		return s, err
	}
	config := filepath.Join(dir, "router.yaml")
	if err := os.WriteFile(config, []byte("fleet: {listen: \"127.0.0.1:0\"}\n"), 0o600); err != nil {
		return s, err
	}
	if err := s.start("router", nil, "router", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", filepath.Join(dir, "data")); err != nil {
		return s, err
	}
	join := filepath.Join(dir, "data", "join-url")
	var line string
	if err := s.until(ctx, func() (err error) {
		for name, to := range map[string]*string{"join-url": &line, "admin-url": &s.admin, "admin-token": &s.token} {
			text, e := os.ReadFile(filepath.Join(dir, "data", name))
			*to, err = strings.TrimSpace(string(text)), errors.Join(err, e)
		}
		return err
	}); err != nil {
		return s, err
	}
	fleetOf, err := trust.ParseJoin(line)
	if err != nil {
		return s, err
	}
	s.secret = fleetOf.Secrets[0]
	for i, id := range []string{"giver", "taker"} {
		args := []string{"prefill", "--id", id, "--join-file", join, "--kv-load-timeout", patience.String()}
		env := []string{"XPYD_KV__PEER_SILENCE=" + patience.String(), "XPYD_KV__DIAL_TIMEOUT=" + patience.String(), "XPYD_KV__HANDSHAKE_TIMEOUT=" + patience.String()}
		for _, e := range os.Environ() {
			if strings.HasPrefix(e, "XPYD_KV__") { // for the workers alone: a router knows no such settings
				env = append(env, e)
			}
		}
		if s.o.model != "" {
			args = append(args, "--model", s.o.model)
		}
		if len(o.gpus) > 0 {
			args = append(args, "--device", "cuda", "--kv-memory", "32GiB", fmt.Sprintf("--batch-invariant=%t", invariant))
			env = append(env, "CUDA_VISIBLE_DEVICES="+o.gpus[i], "XPYD_CUDA_LIB="+o.library)
		} else {
			args = append(args, "--device", "cpu", "--threads", "1")
		}
		if err := s.start(id, env, args...); err != nil {
			return s, err
		}
	}
	return s, s.until(ctx, func() (err error) {
		if s.giver, err = s.member("giver"); err == nil {
			s.taker, err = s.member("taker")
		}
		return err
	})
}

func (s *site) start(name string, env []string, args ...string) error {
	log, err := os.Create(filepath.Join(s.dir, name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.o.xpyd, args...)
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool {
		return strings.HasPrefix(e, "XPYD_") && !strings.HasPrefix(e, "XPYD_CUDA_")
	}), env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{cmd, make(chan struct{})}
	s.procs = append(s.procs, p)
	go func() {
		_ = cmd.Wait() // its log says more
		close(p.done)
	}()
	return nil
}

// close ends the processes, the router last.
func (s *site) close() {
	for _, p := range slices.Backward(s.procs) {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may be gone
		late := time.AfterFunc(20*time.Second, func() { _ = p.cmd.Process.Kill() })
		<-p.done
		late.Stop()
	}
	s.procs = nil
}

// logs are the ends of what the processes said.
func (s *site) logs() (text string) {
	for _, name := range []string{"router", "giver", "taker"} {
		raw, err := os.ReadFile(filepath.Join(s.dir, name+".log"))
		if err != nil {
			continue
		}
		text += fmt.Sprintf("--- %s\n%s", name, raw[max(0, len(raw)-2000):])
	}
	return text
}

// until tries f until it returns nil, within patience, and while all processes run.
func (s *site) until(ctx context.Context, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		for _, p := range s.procs {
			select {
			case <-p.done:
				return fmt.Errorf("%s has ended: %w\n%s", p.cmd.Args[1], err, s.logs())
			default:
			}
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w\n%s", ctx.Err(), err, s.logs())
		}
	}
}

func (s *site) member(id string) (*fleet.Member, error) {
	req, err := http.NewRequest(http.MethodGet, s.admin+"/admin/v1/instances", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	var all struct{ Instances []fleet.Member }
	if err := call(req, func(r io.Reader, _ http.Header) error { return json.NewDecoder(r).Decode(&all) }); err != nil {
		return nil, err
	}
	for i := range all.Instances {
		if m := &all.Instances[i]; m.ID == id && m.State == fleet.Live {
			return m, nil
		}
	}
	return nil, fmt.Errorf("%s is not there", id)
}

// show gives a request to a worker the fleet's token for it.
func (s *site) show(req *http.Request, m *fleet.Member) {
	req.Header.Set(trust.Header, s.secret.Token(trust.HTTP, trust.Member(m.ID, m.Epoch)))
}

// call does a request that must be answered with 200.
func call(req *http.Request, read func(io.Reader, http.Header) error) error {
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return fmt.Errorf("%s %s: %s: %s", req.Method, req.URL.Path, resp.Status, text)
	}
	return read(resp.Body, resp.Header)
}
