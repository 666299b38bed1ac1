package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/logbuf"
	"github.com/xpyd/xpyd/internal/openai"
)

// Audited is a line of the audit log: who changed what, or tried to. It has no token and no
// prompt.
type Audited struct {
	Time    time.Time `json:"time"`
	Action  string    `json:"action"`                   // "POST /admin/v1/instances/decode-0/drain", "reload"
	By      string    `json:"by"`                       // whose token: admin, reader, nobody; or SIGHUP
	Peer    string    `json:"peer,omitempty"`           // its address
	Request string    `json:"request_id,omitempty"`     // ID
	Status  int       `json:"status,omitempty"`         // of the answer
	Asked   string    `json:"asked,omitempty"`          // query and body
	Was     string    `json:"was,omitempty"`            // before, if known
	Is      string    `json:"is,omitempty"`             // after
	LeftOut int       `json:"refused_before,omitempty"` // refusals without a line of their own
}

// auditor writes the audit log: to the log, and to a file if there is one.
type auditor struct {
	log  *slog.Logger
	path string
	also func(*Audited) // nil: nobody else hears of it

	mu      sync.Mutex
	file    *os.File // nil without a path
	tokens  float64  // lines of refusals that may be written
	earned  time.Time
	leftOut int
}

// Refusals may write auditBurst lines at once, and one more every auditEvery.
const (
	auditBurst = 10
	auditEvery = 6 * time.Second
	maxAsked   = 512 // bytes
)

func newAuditor(path string, log *slog.Logger) (*auditor, error) {
	a := &auditor{log: log, path: path, tokens: auditBurst, earned: time.Now()}
	return a, a.reopen()
}

// reopen opens the file again, as it may have been moved away.
func (a *auditor) reopen() error {
	if a.path == "" {
		return nil
	}
	next, err := logbuf.OpenFile(a.path)
	if err != nil {
		return &config.KeyError{Key: "audit_file", Msg: err.Error()}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file != nil {
		err = a.file.Close()
	}
	a.file = next
	return err
}

func (a *auditor) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil {
		return nil
	}
	return a.file.Close()
}

// write adds a line. Anybody can be denied any number of times, so those lines are limited.
func (a *auditor) write(e *Audited, denied bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if denied {
		a.tokens = min(auditBurst, a.tokens+float64(e.Time.Sub(a.earned))/float64(auditEvery))
		a.earned = e.Time
		if a.tokens < 1 {
			a.leftOut++
			return
		}
		a.tokens--
	}
	e.LeftOut, a.leftOut = a.leftOut, 0
	if a.also != nil {
		a.also(e)
	}
	attrs := []any{"audit", true, "action", e.Action, "by", e.By}
	for _, x := range []struct{ key, value string }{{"peer", e.Peer}, {"request_id", e.Request}, {"asked", e.Asked}, {"was", e.Was}, {"is", e.Is}} {
		if x.value != "" {
			attrs = append(attrs, x.key, x.value)
		}
	}
	if e.Status != 0 {
		attrs = append(attrs, "status", e.Status)
	}
	if e.LeftOut != 0 {
		attrs = append(attrs, "refused_before", e.LeftOut)
	}
	a.log.Info("audit", attrs...)
	if a.file == nil {
		return
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = a.file.Write(append(line, '\n'))
	}
	if err != nil && !errors.Is(err, fs.ErrClosed) {
		a.log.Error("audit_file: the line above is not in it", "err", err)
	}
}

// Audit notes changes that do not come through the admin listener.
func (c *Console) Audit(action, by, is string) {
	c.audit.write(&Audited{Time: time.Now(), Action: action, By: by, Is: is}, false)
}

// ReopenAudit opens the audit file again after it was moved away. On an error the old one
// stays in use.
func (c *Console) ReopenAudit() error { return c.audit.reopen() }

type auditKey struct{}

// NoteChange says for the audit log what an admin request changes: the state before, and
// after, if the request succeeds.
func NoteChange(ctx *fasthttp.RequestCtx, was, is string) {
	ctx.SetUserValue(auditKey{}, [2]string{was, is})
}

// audited notes an answered request, unless it only read.
func (c *Console) audited(ctx *fasthttp.RequestCtx, id, verb, path string, by holder) {
	status := ctx.Response.StatusCode()
	denied := status == 401 || status == 403
	if verb == "GET" && !denied {
		return
	}
	e := &Audited{Time: time.Now(), Action: openai.Clip(verb + " " + path), By: by.String(), Peer: ctx.RemoteAddr().String(), Request: id, Status: status}
	if !denied {
		e.Asked = asked(ctx, path)
		if change, ok := ctx.UserValue(auditKey{}).([2]string); ok && status < 300 {
			e.Was, e.Is = change[0], change[1]
		}
	}
	c.audit.write(e, denied)
}

// asked is the query and the body of an admin request, except of one that has a client's
// words.
func asked(ctx *fasthttp.RequestCtx, path string) string {
	body := ctx.PostBody()
	known := false
	for _, p := range []string{"/admin/v1/instances", "/admin/v1/scale", "/admin/v1/profile", "/admin/v1/secret", "/admin/v1/revocations"} {
		known = known || strings.HasPrefix(path, p)
	}
	if !known {
		if len(body) == 0 {
			return ""
		}
		return fmt.Sprintf("%d bytes", len(body))
	}
	text := string(body[:min(len(body), maxAsked)])
	if query := ctx.QueryArgs().QueryString(); len(query) > 0 {
		text = strings.TrimSpace("?" + string(query[:min(len(query), maxAsked)]) + " " + text)
	}
	if len(body) > maxAsked {
		text += "…"
	}
	return config.Redact(strings.ToValidUTF8(text, "?"))
}
