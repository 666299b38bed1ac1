package console

import (
	"encoding/json"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/flight"
)

// serveLedger adds the workers' own ledgers with ?fleet=1.
func (c *Console) serveLedger(ctx *fasthttp.RequestCtx) {
	l := c.Flights.Ledger()
	if string(ctx.QueryArgs().Peek("fleet")) == "1" {
		l.Fleet, _ = c.everyWorker("GET", "/debug/ledger", nil)
	}
	reply(ctx, 200, l)
}

const (
	ledgersAtOnce = 16
	ledgerTimeout = 2 * time.Second
	maxLedger     = 8 << 20
)

// everyWorker sends one request to each worker that may answer, and returns
// the JSON that they said by their ids, an error object for those that failed,
// and the statuses, in no order: below 400 are only those from 200 to 299.
func (c *Console) everyWorker(verb, path string, body []byte) (map[string]json.RawMessage, []int) {
	s := c.Fleet.Snapshot()
	out := make(map[string]json.RawMessage, len(s.Members))
	var statuses []int
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, ledgersAtOnce)
	for i := range s.Members {
		m := &s.Members[i]
		if m.State == fleet.Gone || m.State == fleet.Dead || m.Dialect != "native" {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			status, b := c.oneWorker(m, verb, path, body)
			mu.Lock()
			defer mu.Unlock()
			out[m.ID] = b
			statuses = append(statuses, status)
		})
	}
	wg.Wait()
	return out, statuses
}

func (c *Console) oneWorker(m *fleet.Member, verb, path string, body []byte) (int, json.RawMessage) {
	said, err := c.Flights.Ask(m, flight.Question{Method: verb, Path: path, Body: body, Timeout: ledgerTimeout, Limit: maxLedger})
	var fail *openai.Error
	switch {
	case err != nil:
		fail = openai.Upstream("%v", err)
	case !json.Valid(said.Body):
		fail = openai.Upstream("status %d, and no JSON", said.Status)
	case said.Status < 200 || said.Status > 299 && said.Status < 400 || said.Status > 599:
		fail = openai.Upstream("status %d, which no worker answers", said.Status)
	default:
		return said.Status, said.Body
	}
	return fail.Status, fail.Append(nil)
}
