package client

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// BenchmarkStream is a request with a stream of 16 events. The server is in the same process but
// costs little.
func BenchmarkStream(b *testing.B) {
	var answer strings.Builder
	answer.WriteString("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	const event = `data: {"id":"cmpl-1","object":"text_completion","created":1770000000,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}` + "\n\n"
	for range 16 {
		fmt.Fprintf(&answer, "%x\r\n%s\r\n", len(event), event)
	}
	answer.WriteString("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				r := bufio.NewReader(conn)
				for {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					io.Copy(io.Discard, req.Body)
					io.WriteString(conn, answer.String())
				}
			}()
		}
	}()
	c, err := New(Config{URLs: []string{"http://" + ln.Addr().String()}, Path: "completions", Stream: true, Timeout: time.Minute})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Abort()
	req := &Request{Body: []byte(strings.Repeat("x", 2000))}
	var res Result
	b.ReportAllocs()
	for b.Loop() {
		if c.Do(b.Context(), req, &res); !res.OK() {
			b.Fatal(res.Kind, res.Message)
		}
	}
}
