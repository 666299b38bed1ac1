package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

const (
	wholeBody = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" and some words of an answer","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}}`
	chunkBody = `data: {"id":"cmpl-1","object":"text_completion","created":1770000000,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}` + "\n\n"
	usageBody = `data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":512,"completion_tokens":%d,"total_tokens":528}}` + "\n\ndata: [DONE]\n\n"
	head      = "HTTP/1.1 200 OK\r\nContent-Type: "
)

// engine is the cheapest server that a load generator takes for one: it
// answers at once, or, given a pace, with a token each time.
func engine(pace string) error {
	wait, err := time.ParseDuration(pace)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(os.Stdout, "http://%s\n", ln.Addr()); err != nil {
		return err
	}
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			_ = serve(conn, wait) // the client left
		}()
	}
}

func serve(conn net.Conn, wait time.Duration) error {
	r := bufio.NewReader(conn)
	var body, out []byte
	for {
		length := 0
		for {
			line, err := r.ReadSlice('\n')
			if err != nil {
				return err
			}
			if line = bytes.TrimSpace(line); len(line) == 0 {
				break
			}
			if name, value, _ := bytes.Cut(line, []byte(": ")); bytes.EqualFold(name, []byte("Content-Length")) {
				if length, err = strconv.Atoi(string(value)); err != nil {
					return err
				}
			}
		}
		body = append(body[:0], make([]byte, length)...)
		if _, err := io.ReadFull(r, body); err != nil {
			return err
		}
		tokens := 16
		if _, rest, ok := bytes.Cut(body, []byte(`"max_tokens":`)); ok {
			digits := len(rest) - len(bytes.TrimLeft(rest, "0123456789"))
			tokens, _ = strconv.Atoi(string(rest[:digits])) // 0 is an answer too
		}
		out = out[:0]
		if !bytes.Contains(body, []byte(`"stream":true`)) {
			out = fmt.Appendf(out, head+"application/json\r\nContent-Length: %d\r\n\r\n"+wholeBody, len(wholeBody))
			if _, err := conn.Write(out); err != nil {
				return err
			}
			continue
		}
		out = append(out, head+"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"...)
		for i := range tokens {
			out = fmt.Appendf(out, "%x\r\n%s\r\n", len(chunkBody), chunkBody)
			if wait > 0 || i == 0 {
				if _, err := conn.Write(out); err != nil {
					return err
				}
				out = out[:0]
				time.Sleep(wait)
			}
		}
		last := fmt.Sprintf(usageBody, tokens)
		out = fmt.Appendf(out, "%x\r\n%s\r\n0\r\n\r\n", len(last), last)
		if _, err := conn.Write(out); err != nil {
			return err
		}
	}
}
