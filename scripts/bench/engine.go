package main

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// The mock engine's replies. A chunk's "created" is when it was written, in nanoseconds.
const (
	prefillAnswer = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":1,"total_tokens":513},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"remote_engine_id":"e-1","remote_request_id":"r-1","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}`
	wholeAnswer   = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" and sixteen words of an answer that a model could have given to somebody","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}}`
	chunkAnswer   = `data: {"id":"cmpl-1","object":"text_completion","created":%d,"model":"m","choices":[{"index":0,"text":" word","finish_reason":null}]}` + "\n\n"
	usageAnswer   = `data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":512,"completion_tokens":%d,"total_tokens":528}}` + "\n\n"
	serverInfo    = `{"model_path":"m","served_model_name":"m","tp_size":1,"dp_size":1,"version":"0.5.0","disaggregation_mode":"null","internal_states":[{}]}`
)

// asked has the replies to what routers ask besides completions; anything else gets {}.
var asked = map[string]string{
	"/v1/models":       `{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm","max_model_len":131072}]}`,
	"/version":         `{"version":"0.12.0"}`,
	"/get_server_info": serverInfo, "/server_info": serverInfo, "/get_model_info": serverInfo, "/model_info": serverInfo,
	"/xpyd/v1/prefill": `{"outcome":"done"}`,
	"/load":            `[]`, "/get_load": `[]`, "/v1/loads": `[]`,
}

// burst as a pace sends the first chunk of a stream, then all others in one write.
const burst = -1

// pacePrefix in a request's "user", followed by milliseconds, spaces the stream's chunks.
// holdPrefix, followed by a number of chunks, sends no more than these until the caller leaves.
const pacePrefix, holdPrefix = "pace-", "hold-"

// mockEngine is the cheapest server that a P/D router or a load generator takes for an
// engine, or for a worker of our own. It replies at once, as prefill if decode is to be elsewhere.
// pace spaces the chunks of streams whose request names no pace.
type mockEngine struct{ pace time.Duration }

// serveEngine serves at addr and prints where.
func serveEngine(addr, pace string, say io.Writer) (err error) {
	e := mockEngine{burst}
	if pace != "burst" {
		if e.pace, err = time.ParseDuration(pace); err != nil {
			return err
		}
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Fprintf(say, "listening http://%s\n", ln.Addr())
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() { // ends with the connection
			defer conn.Close()
			_ = e.serve(conn) // the client left
		}()
	}
}

func (e mockEngine) serve(conn net.Conn) error {
	r := bufio.NewReaderSize(conn, 16<<10)
	var body []byte
	for {
		path, length, frames, err := readHead(r)
		if err != nil {
			return err
		}
		body = append(body[:0], make([]byte, length)...)
		if _, err := io.ReadFull(r, body); err != nil {
			return err
		}
		if err := e.answer(conn, path, body, frames); err != nil {
			return err
		}
	}
}

// readHead reads a request up to its body. frames: our router asks which tokens the events stand for.
func readHead(r *bufio.Reader) (path string, length int, frames bool, err error) {
	var h fasthttp.RequestHeader
	if err := h.Read(r); err != nil {
		return "", 0, false, err
	}
	path, _, _ = strings.Cut(string(h.RequestURI()), "?")
	if length = h.ContentLength(); length < 0 || length > 64<<20 {
		return "", 0, false, fmt.Errorf("content length %d", length)
	}
	return path, length, len(h.Peek(ticket.HeaderTokens)) > 0, nil
}

func (e mockEngine) answer(w io.ReadWriter, path string, body []byte, frames bool) error {
	head, end := body[:min(len(body), 4<<10)], body[max(0, len(body)-4<<10):]
	has := func(field string) bool {
		return slices.ContainsFunc([]string{`"` + field + `":true`, `"` + field + `": true`}, func(s string) bool {
			return bytes.Contains(head, []byte(s)) || bytes.Contains(end, []byte(s))
		})
	}
	text := wholeAnswer
	switch {
	case path != "/v1/completions" && path != "/v1/chat/completions":
		text = cmp.Or(asked[path], "{}")
	case has("do_remote_decode"):
		text = prefillAnswer
	case has("stream"):
		pace := e.pace
		if ms := numberAfter(body, pacePrefix, -1); ms >= 0 {
			pace = time.Duration(ms) * time.Millisecond
		}
		return stream(w, numberAfter(body, `"max_tokens":`, 16), numberAfter(body, holdPrefix, -1), pace, has("include_usage"), frames)
	}
	_, err := fmt.Fprintf(w, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
	return err
}

// numberAfter returns the number after the last occurrence of a text.
func numberAfter(body []byte, after string, otherwise int) int {
	i := bytes.LastIndex(body, []byte(after))
	if i < 0 {
		return otherwise
	}
	v, err := leadingInt(bytes.TrimLeft(body[i+len(after):], " "))
	if err != nil {
		return otherwise
	}
	return int(v)
}

// leadingInt parses the digits that text begins with.
func leadingInt(text []byte) (int64, error) {
	return strconv.ParseInt(string(text[:len(text)-len(bytes.TrimLeft(text, "0123456789"))]), 10, 64)
}

// stream writes a reply in chunks, one write each except in a burst.
func stream(w io.ReadWriter, chunks, hold int, pace time.Duration, usage, frames bool) error {
	out := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
	put := func(text string) { out = fmt.Appendf(out, "%x\r\n%s\r\n", len(text), text) }
	var tick *time.Ticker
	if pace > 0 {
		tick = time.NewTicker(pace)
		defer tick.Stop()
	}
	for i := range chunks {
		if tick != nil {
			<-tick.C
		}
		if i == hold {
			_, err := io.Copy(io.Discard, w)
			return err
		}
		frame := ""
		if frames {
			frame = ":t 0 " + string(openai.AppendIDs(nil, []int32{10_000 + int32(i)}))
			if i == 0 {
				frame += " 1 0123456789abcdef"
			}
			frame += "\n"
		}
		put(frame + fmt.Sprintf(chunkAnswer, time.Now().UnixNano()))
		if i == 0 || pace != burst {
			if _, err := w.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
	}
	if usage {
		put(fmt.Sprintf(usageAnswer, chunks))
	}
	put("data: [DONE]\n\n")
	_, err := w.Write(append(out, "0\r\n\r\n"...))
	return err
}
