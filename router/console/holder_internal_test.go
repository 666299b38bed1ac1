package console

import (
	"testing"

	"github.com/valyala/fasthttp"
)

// TestNoToken: without a read-only token nothing passes for one.
func TestNoToken(t *testing.T) {
	f := func(ro, shown string, want holder) {
		t.Helper()
		r := &Console{Deps: Deps{Token: "secret", TokenRO: ro}}
		var ctx fasthttp.RequestCtx
		if shown != "" {
			ctx.Request.Header.Set("Authorization", shown)
		}
		if got := r.holder(&ctx, "/admin/v1/instances"); got != want {
			t.Errorf("%q shows %q: %v, want %v", ro, shown, got, want)
		}
	}
	f("", "", nobody)
	f("", "Bearer ", nobody)
	f("", "Basic Og==", nobody)
	f("", "Bearer secret", admin)
	f("reads", "Bearer ", nobody)
	f("reads", "Bearer reads", reader)
	f("reads", "Bearer secret", admin)
}
