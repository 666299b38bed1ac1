package main

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/router/console"
)

// fleetSecret keeps a router's copy of the fleet's secret: its own, in its data folder, or the one
// in another router's join file.
type fleetSecret struct {
	data   *datadir.Dir
	ring   *trust.Ring
	joined *joining // nil: the secret is this router's own
	log    *slog.Logger

	mu    sync.Mutex
	url   string        // NATS's, for the join line
	moves bool          // url is the other router's
	nats  *fleet.Server // nil with an external one
	watch *fleet.Watcher
}

// openFleetSecret reads the secret, or makes one.
func openFleetSecret(data *datadir.Dir, joined *joining, log *slog.Logger) (s *fleetSecret, err error) {
	s = &fleetSecret{data: data, log: log}
	secrets := joined.Secrets
	if joined.given() {
		s.joined = joined
	} else if secrets, err = ownSecrets(data); err != nil {
		return nil, err
	}
	s.ring, err = trust.NewRing(secrets...)
	return s, err
}

// ownSecrets reads the secrets of the data folder, newest first, one a line.
func ownSecrets(data *datadir.Dir) ([]trust.Secret, error) {
	text, err := data.Read(fileSecret)
	if errors.Is(err, fs.ErrNotExist) {
		made := []trust.Secret{trust.NewSecret()}
		return made, writeSecrets(data, made)
	}
	if err != nil {
		return nil, err
	}
	lost := func(err error) error {
		return fmt.Errorf("%s/%s: %w; put it back, or remove it: the router then makes a new one, which all workers need", data.Path(), fileSecret, err)
	}
	var out []trust.Secret
	for line := range strings.Lines(string(text)) {
		secret, err := trust.ParseSecret(strings.TrimSpace(line))
		if err != nil {
			return nil, lost(err)
		}
		out = append(out, secret)
	}
	if len(out) == 0 {
		return nil, lost(errors.New("it is empty"))
	}
	return out, nil
}

func writeSecrets(data *datadir.Dir, secrets []trust.Secret) error {
	var b strings.Builder
	for _, s := range secrets {
		b.WriteString(s.Reveal() + "\n")
	}
	return data.Write(fileSecret, []byte(b.String()))
}

// before returns the folder's previous join line, if any.
func (s *fleetSecret) before() trust.Join {
	if text, err := s.data.Read(fileJoin); err == nil {
		if j, err := trust.ParseJoin(string(text)); err == nil {
			return j
		}
	}
	return trust.Join{}
}

// host names the embedded server that follows changes; nil: none.
func (s *fleetSecret) host(nats *fleet.Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nats = nats
}

// publish writes the files for workers and Prometheus. Every member has the oldest secret in force,
// so that one opens its metrics.
func (s *fleetSecret) publish() error {
	secrets := s.ring.Secrets()
	line := trust.Join{URL: s.url, Secrets: secrets}
	return errors.Join(s.data.Write(fileJoin, []byte(line.Reveal()+"\n")),
		s.data.Write(fileScrape, []byte(scrapeToken(secrets)+"\n")))
}

func scrapeToken(secrets []trust.Secret) string {
	return secrets[len(secrets)-1].Token(trust.Scrape, "")
}

// put changes the secrets in force, here and in the files that others read. The caller holds mu.
func (s *fleetSecret) put(secrets []trust.Secret) error {
	if err := s.ring.Set(secrets...); err != nil {
		return err
	}
	return s.renew()
}

// heed retires revoked secrets here too, even if the other router's join file still names them.
func (s *fleetSecret) heed(revoked []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ring.Retire(revoked) {
		return nil
	}
	return s.renew()
}

// renew applies a changed ring. The caller holds mu.
func (s *fleetSecret) renew() error {
	err := s.publish()
	if err == nil && s.nats != nil {
		err = s.nats.Renew()
	}
	return err
}

// follow applies the current content of the other router's join file.
func (s *fleetSecret) follow(j trust.Join, conn *fleet.Conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.moves && j.URL != "" && j.URL != s.url {
		if err := conn.Rejoin(j.URL); err != nil {
			return err
		}
		s.url = j.URL
	}
	return s.put(j.Secrets)
}

func notOwn() error {
	return openai.BadRequest("", "this router has its secret from another router's join file: change it there, and this one follows")
}

// rotate makes a new secret. The older one stays in force beside it.
func (s *fleetSecret) rotate() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.ring.Secrets()
	switch {
	case s.joined != nil:
		return notOwn()
	case len(now) > 1:
		return openai.BadRequest("", "%s still replaces %s: `xpyd secret retire` ends that first", now[0].ID(), now[1].ID())
	}
	next := []trust.Secret{trust.NewSecret(), now[0]}
	if err := writeSecrets(s.data, next); err != nil {
		return err
	}
	s.log.Info("the fleet has a new secret", "secret", next[0], "replaces", next[1])
	return s.put(next)
}

// retire ends the older secret, unless that shuts a member out.
func (s *fleetSecret) retire(force bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.ring.Secrets()
	switch {
	case s.joined != nil:
		return notOwn()
	case len(now) < 2:
		return openai.BadRequest("", "there is one secret, %s: `xpyd secret rotate` makes another", now[0].ID())
	}
	if lack := lacking(s.watch.Snapshot(), now[0]); len(lack) > 0 && !force {
		return openai.BadRequest("", "members without %s would be shut out: %s; copy join-url there, or use --force", now[0].ID(), strings.Join(lack, ", "))
	}
	if err := writeSecrets(s.data, now[:1]); err != nil {
		return err
	}
	s.log.Info("an older secret is retired", "secret", now[1], "stays", now[0])
	return errors.Join(s.put(now[:1]), s.shutOut(now[1]))
}

// shutOut revokes a retired secret with all members: those with a copy of an older join line would
// otherwise still accept it. Secrets retired earlier need no revocation: a member that has one of
// them and the newest got the newest later.
func (s *fleetSecret) shutOut(old trust.Secret) error {
	for _, name := range s.watch.Snapshot().Revoked {
		if strings.HasPrefix(name, trust.SecretName) && name != old.String() {
			if err := s.watch.Unrevoke(name); err != nil {
				return err
			}
		}
	}
	return s.watch.Revoke(old.String())
}

// lacking names the members that do not know a secret. A member that trusts everyone needs
// none.
func lacking(all *fleet.Snapshot, newest trust.Secret) (out []string) {
	for i := range all.Members {
		m := &all.Members[i]
		if m.Secrets != "" && m.State != fleet.Gone && m.State != fleet.Dead && !slices.Contains(strings.Split(m.Secrets, "+"), newest.ID()) {
			out = append(out, m.ID)
		}
	}
	return out
}

// secretStatus is the response of GET /admin/v1/secret: the IDs of the secrets in force, and who
// has which.
type secretStatus struct {
	Secrets []string       `json:"secrets"`        // newest first
	From    string         `json:"from,omitempty"` // the join file that they come from
	Members []memberSecret `json:"members"`
	Lacking []string       `json:"lacking,omitempty"` // do not have the newest
}

type memberSecret struct {
	ID      string `json:"id"`
	Secrets string `json:"secrets"` // "": it trusts everyone
}

func (s *fleetSecret) status() secretStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, all := s.ring.Secrets(), s.watch.Snapshot()
	out := secretStatus{Secrets: strings.Split(s.ring.IDs(), "+"), Members: []memberSecret{}, Lacking: lacking(all, now[0])}
	if s.joined != nil {
		out.From = s.joined.file
	}
	for i := range all.Members {
		if m := &all.Members[i]; m.Dialect == fleet.Native && m.State != fleet.Gone {
			out.Members = append(out.Members, memberSecret{m.ID, m.Secrets})
		}
	}
	return out
}

func (s *fleetSecret) mounts() map[string]fasthttp.RequestHandler {
	respondStatus := func(ctx *fasthttp.RequestCtx, err error) {
		var known *openai.Error
		switch {
		case errors.As(err, &known):
			fail(ctx, known)
		case err != nil:
			fail(ctx, openai.Internal("fleet secret: %v", err))
		default:
			respond(ctx, s.status())
		}
	}
	change := func(ctx *fasthttp.RequestCtx, do func() error) {
		was := s.ring.IDs()
		err := do()
		console.NoteChange(ctx, was, s.ring.IDs())
		respondStatus(ctx, err)
	}
	return map[string]fasthttp.RequestHandler{
		"GET /admin/v1/secret":         func(ctx *fasthttp.RequestCtx) { respondStatus(ctx, nil) },
		"POST /admin/v1/secret/rotate": func(ctx *fasthttp.RequestCtx) { change(ctx, s.rotate) },
		"POST /admin/v1/secret/retire": func(ctx *fasthttp.RequestCtx) {
			var order struct {
				Force bool `json:"force"`
			}
			if err := console.ReadBody(ctx, &order, false); err != nil {
				fail(ctx, err)
				return
			}
			change(ctx, func() error { return s.retire(order.Force) })
		},
	}
}
