package main

import (
	"net"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// begin sends the headers of a request whose body is to come in this mode.
func (e *epp) begin(t testing.TB, body filterv3.ProcessingMode_BodySendMode) extproc.ExternalProcessor_ProcessClient {
	t.Helper()
	stream, err := e.client.Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	send(t, stream, &extproc.ProcessingRequest{
		ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: body, ResponseBodyMode: filterv3.ProcessingMode_NONE},
		Request:        &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{}},
	})
	return stream
}

// TestBuffered: where Envoy holds the body itself, the answer to the body says where it goes.
func TestBuffered(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	e := start(t, "address: "+p.addr+", role: prefill, model: m", "address: "+d.addr+", role: decode, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	stream := e.begin(t, filterv3.ProcessingMode_BUFFERED)
	if out, err := stream.Recv(); err != nil || out.GetRequestHeaders() == nil || out.GetRequestHeaders().GetResponse() != nil {
		t.Fatalf("%v, %v", out, err)
	}
	send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(prompt("hi")), EndOfStream: true}}})
	out, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	common := out.GetRequestBody().GetResponse()
	if got := common.GetHeaderMutation().GetSetHeaders(); len(got) != 2 || string(got[0].Header.RawValue) != d.addr || string(got[1].Header.RawValue) != p.addr || common.GetBodyMutation() != nil {
		t.Errorf("%v", out)
	}
}

// TestTrailers: a body whose end trailers tell goes on without an end of its own, and then they do.
func TestTrailers(t *testing.T) {
	b := newEngine(t)
	e := start(t, "address: "+b.addr+", role: both, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	stream := e.begin(t, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED)
	send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(prompt("hi"))}}})
	send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestTrailers{RequestTrailers: &extproc.HttpTrailers{}}})
	var got []*extproc.ProcessingResponse
	for range 3 {
		out, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, out)
	}
	part := got[1].GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
	if got[0].GetRequestHeaders().GetResponse().GetHeaderMutation() == nil || string(part.GetBody()) != prompt("hi") || part.GetEndOfStream() || got[2].GetRequestTrailers() == nil {
		t.Errorf("%v", got)
	}
}

// TestLarge: a body that comes whole and is too large is refused as any other.
func TestLarge(t *testing.T) {
	b := newEngine(t)
	e := start(t, "address: "+b.addr+", role: both, model: m")
	e.wait(t, "serving", func() bool { return e.serving(t) })
	stream := e.begin(t, filterv3.ProcessingMode_BUFFERED)
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	send(t, stream, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: make([]byte, maxBody+1)}}})
	if out, err := stream.Recv(); err != nil || out.GetImmediateResponse().GetStatus().GetCode() != 413 {
		t.Errorf("%v, %v", out, err)
	}
}

// TestHanging: engines whose metrics never come hold up no other, however many they are.
func TestHanging(t *testing.T) {
	entries := []string{}
	for range 100 {
		ln, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and answers nothing
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		entries = append(entries, "address: "+ln.Addr().String()+", role: both, model: m")
	}
	e := start(t, append(entries, "address: "+newEngine(t).addr+", role: both, model: m")...)
	e.wait(t, "serving", func() bool { return e.serving(t) })
}

// BenchmarkExchange is a whole exchange, request and answer, with its client in the same process: Envoy's part
// of the work is in the time, too. Prompts differ, so nothing is warm but the first half of each.
func BenchmarkExchange(b *testing.B) {
	for _, size := range []struct {
		name  string
		bytes int
	}{{"200tokens", 800}, {"8ktokens", 32_000}} {
		b.Run(size.name, func(b *testing.B) {
			var entries []string
			for i := range 32 {
				role := "prefill"
				if i%2 == 1 {
					role = "decode"
				}
				entries = append(entries, "address: "+newEngine(b).addr+", role: "+role+", model: m")
			}
			e := start(b, entries...)
			e.wait(b, "serving", func() bool { return e.serving(b) })
			head := strings.Repeat("word ", size.bytes/10)
			b.ResetTimer()
			for i := range b.N {
				tail := strings.Repeat(string(rune('a'+i%26))+"ord ", size.bytes/10)
				stream, r := e.open(b, prompt(head+tail))
				if r.decode == "" {
					b.Fatal(r)
				}
				finish(b, stream, "200")
			}
		})
	}
}
