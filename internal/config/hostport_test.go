package config_test

import (
	"testing"

	"github.com/xpyd/xpyd/internal/config"
)

func TestHostPort(t *testing.T) {
	for addr, good := range map[string]bool{"127.0.0.1:0": true, ":8000": true, "[::1]:65535": true, "h:80": true,
		"": false, "h": false, "h:": false, "h:65536": false, "h:-1": false, "h:http": false, "::1:80": false} {
		if err := config.HostPort(addr); (err == nil) != good {
			t.Errorf("%q: %v", addr, err)
		}
	}
}
