package router

import (
	"errors"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/router/flight"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
	"github.com/xpyd/xpyd/router/share"
	"github.com/xpyd/xpyd/router/steer"
)

// Config configures a Router.
type Config struct {
	// Listen is the public listener, host:port.
	Listen string `key:"listen"`
	// AdminListen is the admin listener; "" leaves it out.
	AdminListen string `key:"admin_listen"`
	// TLSCert and TLSKey are PEM files that make the public listener TLS. With TLSClientCA
	// clients need a certificate of it. Changed files are read again.
	TLSCert     string `key:"tls_cert"`
	TLSKey      string `key:"tls_key"`
	TLSClientCA string `key:"tls_client_ca"`
	// AdminTLSCert and AdminTLSKey do the same for the admin listener.
	AdminTLSCert string `key:"admin_tls_cert"`
	AdminTLSKey  string `key:"admin_tls_key"`
	// AuditFile gets a line of JSON for each change through the admin listener, besides the
	// log. "": none.
	AuditFile string `key:"audit_file"`
	// RequestLog is a log of requests without their text, for xpyd replay.
	RequestLog requestlog.Config `key:"request_log"`
	// PublicMetrics serves /metrics on the public listener too.
	PublicMetrics bool `key:"public_metrics"`

	// RootPath is where a proxy in front shows the public listener, such as /llm: paths below it are as those
	// without it. "": nowhere else.
	RootPath string `key:"root_path"`

	CORS CORS `key:"cors"` // of the public listener

	h1.Bounds   // of the public listener, and except StallTimeout of the admin's
	h1.Timeouts // of legs
	flight.Policy

	sense.Sources

	// Upstream is how engines are reached.
	Upstream h1.Upstream `key:"upstream"`

	Pick pick.Config `key:"pick"` // its policy is reloadable
	// Share is what routers side by side tell each other.
	Share share.Config `key:"share"`
	// Planner decides how many workers of which role there should be.
	Planner steer.Config `key:"planner"`
}

// DefaultConfig is for one machine.
func DefaultConfig() Config {
	return Config{
		Listen: "127.0.0.1:8000", AdminListen: "127.0.0.1:8001", RequestLog: requestlog.DefaultConfig(),
		Bounds: h1.DefaultBounds(), Timeouts: h1.DefaultTimeouts(), Policy: flight.DefaultPolicy(),
		Sources: sense.DefaultSources(), CORS: CORS{MaxAge: 10 * time.Minute},
		Pick: pick.DefaultConfig(), Share: share.DefaultConfig(), Planner: steer.DefaultConfig(),
	}
}

// Validate returns errors that are each a *config.KeyError.
func (c Config) Validate() error {
	for _, a := range []struct{ key, addr string }{{"listen", c.Listen}, {"admin_listen", c.AdminListen}} {
		if a.addr == "" && a.key == "admin_listen" {
			continue
		}
		if err := config.HostPort(a.addr); err != nil {
			return config.Bad(a.key, "%v", err)
		}
	}
	if p := c.RootPath; p != "" && (p == "/" || path.Clean("/"+p) != p || (&url.URL{Path: p}).EscapedPath() != p) {
		return config.Bad("root_path", "%q is no path such as /llm", p)
	}
	for own := range routes {
		if c.RootPath != "" && (own == c.RootPath || strings.HasPrefix(own, c.RootPath+"/")) {
			return config.Bad("root_path", "%s begins paths of the router itself", c.RootPath)
		}
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return config.Bad("tls_cert", "tls_cert and tls_key go together")
	}
	if c.TLSClientCA != "" && c.TLSCert == "" {
		return config.Bad("tls_client_ca", "it needs tls_cert and tls_key")
	}
	if (c.AdminTLSCert == "") != (c.AdminTLSKey == "") {
		return config.Bad("admin_tls_cert", "admin_tls_cert and admin_tls_key go together")
	}
	if c.Discovery.P2PListen != "" {
		const why = "discovery.p2p_listen is set, and whoever registers there would be sent it"
		switch {
		case c.Upstream.APIKey != "":
			return config.Bad("upstream.api_key", why)
		case c.Upstream.PassAuthorization:
			return config.Bad("upstream.pass_authorization", why)
		}
	}
	return errors.Join(config.Within("cors", c.CORS.Validate()), config.Within("request_log", c.RequestLog.Validate()), c.Bounds.Validate(), c.Timeouts.Validate(), c.Policy.Validate(), c.Sources.Validate(),
		config.Within("upstream", c.Upstream.Validate()), config.Within("pick", c.Pick.Validate()), config.Within("share", c.Share.Validate()), config.Within("planner", c.Planner.Validate()))
}
