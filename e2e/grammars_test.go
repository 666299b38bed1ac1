package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

// TestHostileGrammars: grammars that are made to be expensive are served or refused with a 400 that
// says what of them to mend, and a request behind them is served. internal/grammar counts what they cost.
func TestHostileGrammars(t *testing.T) {
	watcher, nats := startFleet(t)
	for _, role := range []fleet.Role{fleet.Prefill, fleet.Decode} {
		startWorker(t, role, func(c *worker.Config) { c.Fleet.URL, c.KV.Transport = nats, "tcp" })
	}
	url := startRouter(t, router.Deps{Fleet: watcher}) + "/v1/completions"

	list := func(n int, f func(i int) string) string {
		parts := make([]string, n)
		for i := range parts {
			parts[i] = f(i)
		}
		return strings.Join(parts, ",")
	}
	schema := func(s string) string { return `"guided_json":` + s }
	text := func(field, s string) string { b, _ := json.Marshal(s); return `"` + field + `":` + string(b) }
	for name, fields := range map[string]string{
		"repetitions":       text("regex", `(a{1000}){1000}`),
		"nullable tower":    text("regex", `(((((((a?){9}b?){9}c?){9}d?){9}e?){9}f?){9}g?){9}`),
		"exact rounds":      text("regex", `(a|b)*a(a|b){4000}`),
		"deep groups":       text("regex", strings.Repeat("(", 100_000)),
		"megabyte":          text("regex", strings.Repeat("a|b", 350_000)),
		"classes":           text("regex", strings.Repeat(`[^\p{L}\x{1F600}]`, 5000)),
		"patterns":          schema(`{"type":"string","allOf":[` + list(5, func(i int) string { return fmt.Sprintf(`{"pattern":"(.%c.*){9}"}`, 'a'+i) }) + `]}`),
		"10,000 properties": schema(`{"type":"object","properties":{` + list(10_000, func(i int) string { return fmt.Sprintf(`"p%d":{"type":"string"}`, i) }) + `}}`),
		"anyOf of 10,000":   schema(`{"anyOf":[` + list(10_000, func(i int) string { return fmt.Sprintf(`{"properties":{"p%d":{"type":"string"}}}`, i) }) + `]}`),
		"enum of 400 KB":    schema(`{"enum":[` + list(30_000, func(i int) string { return fmt.Sprintf(`"w%d"`, i*7919) }) + `]}`),
		"refs in a ring":    schema(`{"$defs":{` + list(300, func(i int) string { return fmt.Sprintf(`"d%d":{"$ref":"#/$defs/d%d"}`, i, (i+1)%300) }) + `},"$ref":"#/$defs/d0"}`),
		"left recursion":    text("ebnf", "root ::= a\na ::= b\nb ::= a | root \"x\" | root"),
		"exponential rules": text("ebnf", list(40, func(i int) string { return fmt.Sprintf("\nr%d ::= r%d r%d\n#", i, i+1, i+1) })+"\nr40 ::= \"a\"\nroot ::= r0"),
		"huge alternation":  text("ebnf", "root ::= "+strings.Repeat(`"ab" | "a" [a-z] | `, 20_000)+`"c"`),
		"ambiguous":         text("ebnf", `root ::= root root root | root root | "a" | ""`),
	} {
		t.Run(name, func(t *testing.T) {
			status, body := post(t, url, nil, `{"prompt":"Once","max_tokens":4,`+fields+`}`)
			var answer struct {
				Choices []json.RawMessage
				Error   *struct{ Message, Type, Param string }
			}
			if err := json.Unmarshal(body, &answer); err != nil {
				t.Fatalf("%d %.300s", status, body)
			}
			served := status == http.StatusOK && len(answer.Choices) == 1
			e := answer.Error
			refused := status == http.StatusBadRequest && e != nil && e.Type == "invalid_request_error" && strings.HasPrefix(fields, `"`+e.Param+`"`) && e.Message != ""
			if !served && !refused {
				t.Errorf("%d %.300s", status, body)
			}
		})
	}
	if status, body := post(t, url, nil, `{"prompt":"Once","max_tokens":20,"regex":"[0-9]{3}"}`); status != http.StatusOK {
		t.Errorf("behind them: %d %s", status, body)
	}
}
