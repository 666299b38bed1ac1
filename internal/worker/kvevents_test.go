package worker_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/router/index"
)

// TestKVEvents: an index that follows a worker, from before or after, knows
// how much of a prompt it has; what a salt keeps apart is not told.
func TestKVEvents(t *testing.T) {
	w := start(t, nil)
	follow := func() (*index.Index, func(want int, q index.Query)) {
		x := index.New(1 << 20)
		inst := w.Instance()
		feed := kvevents.NewFeed(kvevents.FeedConfig{Endpoint: inst.KVEvents, Replay: inst.KVReplay,
			Handler: x.Add(index.Key{ID: inst.ID}, inst.Model, index.Decode)})
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { feed.Run(ctx) })
		t.Cleanup(func() { cancel(); wg.Wait() })
		return x, func(want int, q index.Query) {
			t.Helper()
			soon(t, 5*time.Second, func() error {
				total := 0
				for _, h := range x.Match(&q) {
					total += h.Total()
				}
				if total != want {
					return fmt.Errorf("%d tokens, want %d", total, want)
				}
				return nil
			})
		}
	}
	_, before := follow()
	ids := make([]uint32, 50)
	body := `{"max_tokens":1,"prompt":[`
	for i := range ids {
		ids[i] = uint32(100 + i)
		if i > 0 {
			body += ","
		}
		body += fmt.Sprint(ids[i])
	}
	complete(t, w, nil, body+"]}")
	q := index.Query{Model: w.Instance().Model, Tokens: ids}
	before(48, q)
	_, after := follow()
	after(48, q)
	complete(t, w, nil, body+`],"cache_salt":"secret"}`)
	complete(t, w, nil, `{"max_tokens":1,"prompt":[5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21],"cache_salt":"secret"}`)
	complete(t, w, nil, `{"max_tokens":1,"prompt":[7,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21]}`)
	before(16, index.Query{Model: q.Model, Tokens: []uint32{7, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}})
	before(0, index.Query{Model: q.Model, Tokens: []uint32{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}})
}
