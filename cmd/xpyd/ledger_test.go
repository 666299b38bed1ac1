package main

import (
	"encoding/json"
	"strings"
	"testing"
)

const ledgers = `{"process":"router","at":"2026-01-02T03:04:10Z","legs":2,
"requests":[
  {"request_id":"a","state":"relay","since":"2026-01-02T03:04:05Z","path":"/v1/completions","attempts":[{"prefill":{"id":"p9"},"decode":{"id":"d9"}},{"prefill":{"id":"p0"},"decode":{"id":"d0"}}]},
  {"request_id":"probe","internal":true,"state":"x","since":"2026-01-02T03:04:00Z"}],
"fleet":{
 "d0":{"id":"d0","requests":[],"held":[],
  "blocks":[{"owner":"a/0","blocks":[1,2,3],"state":"receiving","since":"2026-01-02T03:04:07Z","why":"a prefill fills them under a ticket"},
            {"owner":"old/0","blocks":[7,8],"state":"quarantined","since":"2026-01-02T03:03:10Z","why":"a peer that was told to stop may still write to them"}],
  "tickets":[{"side":"receiver","request_id":"a","peer":{"id":"p0","epoch":5},"state":"accepted","since":"2026-01-02T03:04:07Z","blocks":3,"missing":4,"why":"rows\nto come"}]},
 "p0":{"id":"p0","requests":[],"blocks":[],"tickets":[],
  "held":[{"kind":"leased","id":"cmpl-1","owner":"b/0","blocks":6,"since":"2026-01-02T03:04:00Z","why":"finished prompt waits to be collected"},
          {"kind":"awaited","id":"00ff","since":"2026-01-02T03:04:06Z","why":"the router's leg waits"}]},
 "p1":{"error":{"message":"connection refused"}},
 "vllm-0":{"detail":"Not Found"}}}`

func TestLedgerTable(t *testing.T) {
	var f fleetLedger
	if err := json.Unmarshal([]byte(ledgers), &f); err != nil {
		t.Fatal(err)
	}
	h := f.lines()
	var b strings.Builder
	if err := h.print(&b); err != nil {
		t.Fatal(err)
	}
	want := `8 held; 2 blocks quarantined, 6 leased

AGE  PROCESS  KIND     ID      STATE        BLOCKS  MISSING  PEER       WHY
1m0s  d0      blocks   old/0   quarantined  2       -        -          a peer that was told to stop may still write to them
10s  p0       lease    cmpl-1  leased       6       -        -          finished prompt waits to be collected
5s   router   request  a       relay        -       -        p0, d0     a client waits for its answer to /v1/completions
4s   p0       link     00ff    awaited      -       -        -          the router's leg waits
3s   d0       blocks   a/0     receiving    3       -        -          a prefill fills them under a ticket
3s   d0       ticket   a       accepted     3       4        from p0@5  rows to come
-    p1       unknown  -       unknown      -       -        -          connection refused
-    vllm-0   unknown  -       unknown      -       -        -          it keeps no ledger
`
	squeeze := func(s string) string {
		lines := strings.Split(s, "\n")
		for i, l := range lines {
			lines[i] = strings.Join(strings.Fields(l), " ")
		}
		return strings.Join(lines, "\n")
	}
	if got := b.String(); squeeze(got) != squeeze(want) {
		t.Errorf("have\n%s\nwant\n%s", got, want)
	}
	if h.Lines[0].Age != 60 || h.Quarantined != 2 || h.Leased != 6 {
		t.Errorf("%+v", h)
	}
}

func TestLedgerEmpty(t *testing.T) {
	var f fleetLedger
	if err := json.Unmarshal([]byte(`{"process":"router","at":"2026-01-02T03:04:10Z","requests":[],"fleet":{"d0":{"blocks":[],"tickets":[],"held":[],"requests":[]}}}`), &f); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := f.lines().print(&b); err != nil || b.String() != "nothing is held\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
}
