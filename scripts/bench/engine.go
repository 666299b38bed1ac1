package main

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"
)

// engine is the cheapest thing that a P/D router takes for an engine: it
// answers at once, as prefill when it is asked to decode elsewhere. A "user"
// of "pace-MS" spaces the chunks of a stream; each carries the time when it
// was written, in nanoseconds.
func engine(addr string) error {
	s := &fasthttp.Server{NoDefaultServerHeader: true, MaxRequestBodySize: 64 << 20, Handler: serve, Concurrency: 1 << 16}
	return s.ListenAndServe(addr)
}

var (
	doRemoteDecode  = [][]byte{[]byte(`"do_remote_decode":true`), []byte(`"do_remote_decode": true`)}
	streaming       = [][]byte{[]byte(`"stream":true`), []byte(`"stream": true`)}
	paced           = []byte(`pace-`)
	maxTokens       = []byte(`"max_tokens":`)
	prefillAnswer   = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":1,"total_tokens":513},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"remote_engine_id":"e-1","remote_request_id":"r-1","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}`
	wholeAnswer     = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" and sixteen words of an answer that a model could have given to somebody","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}}`
	modelsAnswer    = `{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm","max_model_len":131072}]}`
	serverInfo      = `{"model_path":"m","served_model_name":"m","tp_size":1,"dp_size":1,"version":"0.5.0","disaggregation_mode":"null","internal_states":[{}]}`
	chunkFormat     = `data: {"id":"cmpl-1","object":"text_completion","created":%d,"model":"m","choices":[{"index":0,"text":" word","finish_reason":null}]}` + "\n\n"
	streamBatchSize = 16
)

func serve(ctx *fasthttp.RequestCtx) {
	ctx.SetContentType("application/json")
	switch path := string(ctx.Path()); path {
	case "/v1/completions", "/v1/chat/completions":
	case "/v1/models":
		ctx.SetBodyString(modelsAnswer)
		return
	case "/version":
		ctx.SetBodyString(`{"version":"0.12.0"}`)
		return
	case "/get_server_info", "/server_info", "/get_model_info", "/model_info":
		ctx.SetBodyString(serverInfo)
		return
	case "/load", "/get_load", "/v1/loads":
		ctx.SetBodyString(`[]`)
		return
	default:
		ctx.SetBodyString(`{}`)
		return
	}
	body := ctx.PostBody()
	head, end := body[:min(len(body), 4<<10)], body[max(0, len(body)-4<<10):]
	has := func(any [][]byte) bool {
		for _, s := range any {
			if bytes.Contains(head, s) || bytes.Contains(end, s) {
				return true
			}
		}
		return false
	}
	switch {
	case has(doRemoteDecode):
		ctx.SetBodyString(prefillAnswer)
	case !has(streaming):
		ctx.SetBodyString(wholeAnswer)
	default:
		stream(ctx, number(body, maxTokens, streamBatchSize), time.Duration(number(body, paced, 0))*time.Millisecond)
	}
}

func number(body, after []byte, otherwise int) int {
	i := bytes.LastIndex(body, after)
	if i < 0 {
		return otherwise
	}
	digits := bytes.TrimLeft(body[i+len(after):], " ")
	n := 0
	for n < len(digits) && digits[n] >= '0' && digits[n] <= '9' {
		n++
	}
	v, err := strconv.Atoi(string(digits[:n]))
	if err != nil {
		return otherwise
	}
	return v
}

func stream(ctx *fasthttp.RequestCtx, chunks int, pace time.Duration) {
	ctx.SetContentType("text/event-stream; charset=utf-8")
	ctx.SetBodyStreamWriter(func(w *bufio.Writer) {
		var tick *time.Ticker
		if pace > 0 {
			tick = time.NewTicker(pace)
			defer tick.Stop()
		}
		for range chunks {
			if tick != nil {
				<-tick.C
			}
			fmt.Fprintf(w, chunkFormat, time.Now().UnixNano())
			if w.Flush() != nil {
				return
			}
		}
		_, _ = w.WriteString("data: [DONE]\n\n") // the reader may have left
	})
}
