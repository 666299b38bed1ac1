package dialect

import (
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
)

// sglang sends both legs at once with the same body, and for each prompt a bootstrap room in
// which prefill and decode meet.
var sglang = Dialect{
	Rules: Rules{
		Order: Together,
		// Prefill stops after one token by itself; the engine repeats rooms for n. Prompt log
		// probabilities would have to be merged.
		Splits: []Shape{Choices, Batch, Chat, Logprobs},
		// Closing a connection in the middle of a transfer can leak blocks.
		Linger: 2 * time.Second,
		Hold:   300 * time.Second, Watched: true, Usage: true,
		Hint: "decode waits up to 300 s for a prefill that it cannot meet; check bootstrap, page_size and kv_cache_dtype",
	},
	Prefill: func(h *fasthttp.RequestHeader, x *Exchange) [][]byte { return sglangLeg(h, x, x.Prefill) },
	Decode:  func(h *fasthttp.RequestHeader, x *Exchange) [][]byte { return sglangLeg(h, x, x.Decode) },
	Result:  status,
}

// sglangLeg adds the rooms, and the ranks of engines that have several.
func sglangLeg(h *fasthttp.RequestHeader, x *Exchange, to *fleet.Instance) [][]byte {
	foreign(h, x)
	host, port := bootstrap(x.Prefill, 0)
	name, number := string(openai.AppendString(nil, host)), "null" // null: the engine's default
	if port > 0 {
		number = strconv.Itoa(port)
	}
	rooms := strconv.FormatUint(room(x, 0), 10)
	e := openai.NewEdit(x.Body, x.Top)
	if n := x.Top.Prompts; n > 1 {
		rooms = list(n, func(i int) string { return strconv.FormatUint(room(x, i), 10) })
		name = list(n, func(int) string { return name })
		number = list(n, func(int) string { return number })
	}
	e.Add("bootstrap_host", name)
	e.Add("bootstrap_port", number)
	e.Add("bootstrap_room", rooms)
	if to.DPRanks > 1 {
		e.Set(openai.RoutedDPRank, strconv.Itoa(rank(x, to)))
	}
	if to == x.Decode && x.Prefill.DPRanks > 1 {
		e.Set(openai.PrefillDPRank, strconv.Itoa(rank(x, x.Prefill)))
	}
	return e.Parts()
}

// list returns a JSON list of n items.
func list(n int, item func(i int) string) string {
	b := []byte{'['}
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, item(i)...)
	}
	return string(append(b, ']'))
}
